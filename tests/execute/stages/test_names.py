"""Layers whose parameters have names that do not begin with the layer's: state, ties and gradients are right."""

import torch
from torch import nn

import penstock as ps
from penstock.execute.stages.names import full_name, named_parameters, part_of_state
from tests.support.local_pipelines import on_ranks
from tests.support.using import Using

WORDS, TARGET = torch.arange(12).reshape(6, 2) % 7, torch.arange(12).reshape(6, 2) % 5


def loss_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def ends():
    """Return a layer that holds an embedding and a position under names of two other branches of the unsplit model."""
    embed, place = nn.Embedding(7, 4, dtype=torch.float64), nn.Parameter(torch.zeros(4, dtype=torch.float64))
    names = {"has_full_names": True, "layer_name": "embed"}
    return Using(lambda self, words: self.embed(words) + self.place, place=place, embed=embed, **names)


def head():
    linear = nn.Linear(4, 7, bias=False, dtype=torch.float64)
    return Using(lambda self, hidden: self.head(hidden), head=linear, has_full_names=True, layer_name="end")


def test_a_name_has_the_prefix_of_its_layer_but_where_the_layer_knows_better():
    assert full_name("3", nn.Linear(2, 2), "weight") == "3.weight"
    assert full_name("first", ends(), "embed.weight") == "embed.weight"
    assert [name for name, _ in named_parameters("first", ends())] == ["place", "embed.weight"]


def test_a_layer_gets_what_a_state_has_for_it():
    state = {"3.weight": 1, "3.bias": 2, "33.weight": 3, "embed.weight": 4, "place": 5, "3.place": 6}

    assert part_of_state("3", nn.Linear(2, 2), state) == {"weight": 1, "bias": 2, "place": 6}
    assert part_of_state("3", ends(), state) == {"embed.weight": 4, "place": 5}


def test_a_spec_says_it_of_a_layer_that_is_not_built():
    spec = ps.LayerSpec("end", head, has_full_names=True)

    assert spec.full_name("head.weight") == "head.weight"
    assert ps.LayerSpec("end", nn.Identity).full_name("weight") == "end.weight"


def test_lazy_layers_tied_by_full_names_share_gradients_over_ranks():
    specs = [
        ps.LayerSpec("embed", ends, has_full_names=True),
        ps.LayerSpec("1", lambda: nn.Linear(4, 4, dtype=torch.float64)),
        ps.LayerSpec("end", head, tied=(("head.weight", "embed.weight"),), has_full_names=True),
    ]

    def train(transport, num_ranks=2):
        options = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(specs, "1f1b", 2, loss_of, **options)
        pipeline.step(WORDS, target=TARGET)
        return {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    whole = train(None, 1)
    parts = on_ranks(2, train)

    for part in parts:
        for name, gradient in part.items():
            expected = whole["embed.weight" if name == "head.weight" else name]
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
