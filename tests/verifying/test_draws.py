"""Dropout is found by its name, put to 0 and back; generators are as they were."""

import random

import torch
from torch import nn

from penstock.verifying.draws import has_drawn, own_generators, probabilities, seed_generators, without_dropout

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

    with without_dropout([model], is_on=True):
        assert (model.attention_dropout, model.inner.p) == (0.0, 0.0)
    with without_dropout([model], is_on=False):
        assert model.attention_dropout == 0.3

    assert (model.attention_dropout, model.p, model.inner.p) == (0.3, 0.7, 0.1)


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
