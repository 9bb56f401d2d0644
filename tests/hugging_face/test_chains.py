"""Lists of blocks, their order and the layers that they become, on models of torch alone."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.hugging_face.chains import (
    block_lists,
    called_chains,
    layer_segments,
    positions_by_layer,
)
from penstock.models.cutting.cut import segments
from penstock.models.cutting.order import CallOrder, ModuleCall, in_order_of_calls
from penstock.models.cutting.points import cut_model

CALLS = [
    *("patches", "vision.0", "mergers.0", "vision.1", "mergers.1", "vision.2", "norm"),
    *("words", "language.0", "language.1", "head"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, hidden):
        return self.experts[0](hidden)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.words, self.norm, self.head = (nn.Linear(2, 2) for _ in range(4))
        self.language = nn.ModuleList(Block() for _ in range(2))
        self.vision, self.mergers = (nn.ModuleList(nn.Linear(2, 2) for _ in range(number)) for number in (3, 2))
        self.activations = nn.ModuleList([nn.GELU()])


def order_of(names, shape=(1, 4, 2)):
    value = torch.zeros(shape)
    return CallOrder(tuple(ModuleCall(name, (value,), {}) for name in names))


def test_lists_are_the_outermost_ones_with_parameters_or_those_that_patterns_match():
    model = Towers()

    assert block_lists(model) == ["language", "vision", "mergers"]
    assert block_lists(model, ["vision", "lang*"]) == ["vision", "language"]
    assert block_lists(model, ["language.*.experts"]) == ["language.0.experts", "language.1.experts"]


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["visions"], r"chains: 'visions' names no list of blocks of Towers\. Did you mean 'vision'\?"),
        (["vision.*"], "'vision.*' names no list of blocks"),
        ("vision", "expected a list of names of lists"),
        (["language", "language.*.experts"], "'language.0.experts' lies in another one"),
    ],
)
def test_patterns_that_name_no_list_are_refused(patterns, told):
    with pytest.raises(ConfigError, match=told):
        block_lists(Towers(), patterns)


def test_lists_of_lists_are_those_within():
    stages = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))

    assert block_lists(nn.ModuleDict({"stages": stages})) == ["stages.0", "stages.1"]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"Sequential has no list of blocks.*ps\.cut cuts"):
        block_lists(nn.Sequential(nn.Linear(2, 2)))


def test_a_list_that_is_called_between_the_blocks_of_a_longer_one_is_no_chain():
    lists = ["language", "vision", "mergers", "unused"]

    assert called_chains(lists, order_of(CALLS)) == ["vision", "language"]
    assert called_chains(lists, order_of(["mergers.0", "vision.0", "mergers.1", "vision.1", "vision.2"])) == ["vision"]
    assert called_chains(lists, order_of(["mergers.0", "vision.0", "mergers.1", "vision.1"])) == ["mergers"]
    assert called_chains(lists, order_of(["mergers.0", "mergers.1", "vision.0"])) == ["mergers", "vision"]


def test_layers_begin_at_blocks_and_behind_the_last_block_of_a_chain():
    model, order = Towers(), order_of(CALLS)
    cut = cut_model(model, ["vision.*", "language.*"])
    cut = in_order_of_calls(cut, [name for name in CALLS if name[:2] in ("vi", "la")], order)

    layers = layer_segments(segments(cut), ["vision", "language"])

    assert {name: (layer.start, layer.stop, " ".join(layer.modules)) for name, layer in layers.items()} == {
        "patches": (None, "vision.0", "patches"),
        "vision.0": ("vision.0", "vision.1", "vision.0 mergers.0"),
        "vision.1": ("vision.1", "vision.2", "vision.1 mergers.1"),
        "vision.2": ("vision.2", "norm", "vision.2"),
        "words": ("norm", "language.0", "norm words"),
        "language.0": ("language.0", "language.1", "language.0"),
        "language.1": ("language.1", "head", "language.1"),
        "head": ("head", None, "head"),
    }


def test_positions_are_those_of_the_blocks_of_a_chain():
    long, short = order_of(CALLS[:7], (2, 6, 2)), order_of(CALLS[7:], (1, 4, 2))
    order = CallOrder((*long.calls, *short.calls))
    layers = ["patches", "vision.0", "vision.1", "words", "language.0", "head"]

    found = positions_by_layer(layers, ["vision", "language"], order)

    assert list(found.values()) == [3, 3, 3, 3, 1, 1]
