"""A model is cut by the names of its modules, and what is left keeps the names it had."""

import pytest
import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.moving.model_parts import Absent, ModelParts
from tests.support.local_pipelines import error_of


class Model(nn.Module):
    """As torchtitan's: a None stands for what a part lacks."""

    def __init__(self, container=nn.ModuleDict):
        super().__init__()
        self.tok_embeddings = nn.Embedding(5, 4)
        blocks = [nn.Linear(4, 4) for _ in range(3)]
        if container is nn.ModuleDict:
            self.layers = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        else:
            self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 5, bias=False)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for layer in layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden) if self.norm else hidden
        return self.output(hidden) if self.output else hidden


NAMES = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["norm", "output"]]


@pytest.mark.feature("X36")
@pytest.mark.parametrize("container", [nn.ModuleDict, nn.ModuleList])
def test_the_parts_together_have_every_name_and_value_once_and_one_after_another_are_the_model(container):
    model = Model(container)
    hidden = tokens = torch.tensor([[0, 4], [2, 1]])

    parts = [ModelParts(model, NAMES).make(stage) for stage in range(3)]

    found = [(name, value) for part in parts for name, value in part.state_dict().items()]
    assert [name for name, _ in found] == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found)
    for part in parts:
        hidden = part(hidden)
    assert torch.equal(hidden, model(tokens))


def test_what_a_part_lacks_is_none_dropped_or_absent():
    parts = ModelParts(Model(), NAMES)
    in_list = ModelParts(Model(nn.ModuleList), NAMES)

    assert parts.make(1).tok_embeddings is None
    assert list(parts.make(1).layers) == ["1", "2"]
    assert [type(layer) for layer in in_list.make(1).layers] == [Absent, nn.Linear, nn.Linear]
    assert list(parts.make(2).layers) == []


def test_the_model_is_left_alone_and_only_the_part_is_copied():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memory):
            raise AssertionError("copied")

    model = Model()
    model.output = Uncopied(4, 5)

    part = ModelParts(model, NAMES).make(0)

    assert part.output is None
    assert part.tok_embeddings.weight is not model.tok_embeddings.weight
    assert isinstance(model.output, Uncopied)


def test_deeper_names_divide_what_is_above_them():
    model = nn.ModuleDict({"model": Model()})

    part = ModelParts(
        model, [["model.tok_embeddings", "model.layers.0"], ["model.layers", "model.norm", "model.output"]]
    )

    assert [name for name, _ in part.make(0).named_parameters()] == [
        "model.tok_embeddings.weight",
        "model.layers.0.weight",
        "model.layers.0.bias",
    ]


def test_a_parameter_of_several_names_or_parts_is_tied():
    model = Model()
    model.output.weight = model.tok_embeddings.weight
    model.scale = nn.Parameter(torch.ones(1))

    tied = ModelParts(model, NAMES).tied()

    assert tied == [
        ("0.scale", "1.scale"),
        ("0.scale", "2.scale"),
        ("0.tok_embeddings.weight", "2.output.weight"),
    ]


def test_a_module_under_two_names_is_kept_where_one_of_them_is():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Identity()})
    model["second"] = model["first"]
    parts = ModelParts(model, [["first"], ["second"]])

    assert list(parts.make(1)) == ["second"]
    assert isinstance(parts.make(1)["second"], nn.Linear)
    assert ("0.first.weight", "1.second.weight") in parts.tied()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([["tok_embedings"]], "part 0: the model has no module 'tok_embedings'. Did you mean 'tok_embeddings'?"),
        ([["tok_embeddings"], []], "part 1 names no module"),
        ([["tok_embeddings"], ["layers", "norm"]], "no part has the parameter 'output.weight'"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(names, text):
    error = error_of(ModelParts, Model(), names)

    assert isinstance(error, PartitionError)
    assert text in str(error)
