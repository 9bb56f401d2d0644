"""Dropout is found by its name, put to 0 and back; generators are as they were."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.verifying.draws import (
    functions_with_same_dropout,
    has_drawn,
    own_generators,
    probabilities,
    seed_generators,
    without_dropout,
)

CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_dropout, self.p, self.drop_path = 0.3, 0.7, 0.0
        self.inner = nn.Dropout(0.1)


def test_probabilities_are_those_of_dropout_alone():
    model = nn.Sequential(Attention(), nn.AlphaDropout(0.2), nn.MultiheadAttention(4, 2, dropout=0.4))

    values = [(type(module).__name__, name, value) for module, name, value in probabilities([model, model])]

    assert values == [
        ("Attention", "attention_dropout", 0.3),
        ("Dropout", "p", 0.1),
        ("AlphaDropout", "p", 0.2),
        ("MultiheadAttention", "dropout", 0.4),
    ]


def test_probabilities_come_back():
    model = Attention()

    with without_dropout([model]):
        assert (model.attention_dropout, model.inner.p) == (0.0, 0.0)

    assert (model.attention_dropout, model.p, model.inner.p) == (0.3, 0.7, 0.1)


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.5),
        nn.Dropout(0.5, inplace=True),
        nn.AlphaDropout(0.5),
        lambda features: F.dropout(input=features, p=0.5),
        lambda features: F.dropout1d(features, 0.5),
        lambda features: torch.dropout(features, 0.5, True),
    ],
)
def test_functions_drop_the_same_places_within_the_block(drop):
    features = torch.rand(2, 3, 4) + 1

    with functions_with_same_dropout(is_on=True):
        dropped, again = drop(features.clone()), drop(features.clone())

    assert torch.equal(dropped, again)
    assert dropped.count_nonzero() == 12
    assert torch.equal(dropped[dropped != 0], 2 * features[dropped != 0])
    with functions_with_same_dropout(is_on=False):
        assert not torch.equal(drop(features.clone()), drop(features.clone()))


@pytest.mark.parametrize(
    "drop",
    [nn.Dropout(0.5).eval(), F.alpha_dropout, lambda features: torch.dropout(features, 0.5, False), nn.Dropout(0.0)],
)
def test_functions_drop_nothing_where_they_are_not_to(drop):
    features = torch.rand(2, 3, 4)

    with functions_with_same_dropout(is_on=True):
        assert torch.equal(drop(features), features)


def test_a_probability_of_one_drops_all():
    with functions_with_same_dropout(is_on=True):
        assert torch.equal(F.dropout(torch.ones(3), 1.0), torch.zeros(3))


def test_attention_drops_nothing_by_position_or_name():
    query = torch.rand(1, 1, 8, 4)
    attend = F.scaled_dot_product_attention

    with functions_with_same_dropout(is_on=True):
        assert torch.equal(attend(query, query, query, None, 0.5), attend(query, query, query))
        assert torch.equal(attend(query, query, query, dropout_p=0.5), attend(query, query, query))


def test_generators_are_as_they_were():
    states = torch.get_rng_state(), random.getstate()

    with own_generators(CPU):
        seed_generators(1, CPU)
        assert not has_drawn(1, CPU)
        torch.rand(1)
        assert has_drawn(1, CPU)
        random.random()
        assert has_drawn(1, CPU)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
