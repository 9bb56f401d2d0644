"""The microbatch is of real tokens, as many as are asked for."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.sizing.batch import TokenBatch, require_tokens


class Layers(list):
    """Layers with a config."""

    config = SimpleNamespace(max_position_embeddings=16)


def test_tokens_have_the_sizes_and_labels_fit_the_outputs():
    batch = TokenBatch.of([nn.Embedding(4, 2)], 3, 5)

    assert batch.tokens.shape == (3, 5)
    assert batch.tokens.dtype == torch.int64
    assert batch.target_of(torch.zeros(3, 5, 7)).shape == (3, 5)
    assert batch.target_of(torch.zeros(3, 7)).shape == (3,)


def test_a_layer_gets_the_keywords_that_it_takes():
    class Placed(nn.Module):
        def forward(self, hidden, microbatch_place):
            return hidden

    batch = TokenBatch.of([nn.Embedding(4, 2)], 1, 2)

    assert batch.keywords_for(nn.Linear(2, 2)) == {}
    assert batch.keywords_for(Placed()).keys() == {"microbatch_place"}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 4), "microbatch: 0; expected a whole number"),
        ((True, 4), "microbatch: True"),
        ((1, -3), "sequence_length: -3"),
        ((1, 2.5), "sequence_length: 2.5"),
        ((1, 17), "17 tokens, but the model knows 16 positions"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        TokenBatch.of(Layers([nn.Embedding(4, 2)]), *sizes)


def test_a_first_layer_without_tokens_is_refused():
    require_tokens(nn.Sequential(nn.Embedding(4, 2)), "embed")

    with pytest.raises(ConfigError, match="'0', has no table of tokens"):
        require_tokens(nn.Linear(4, 2), "0")
