"""Where a module is cut: patterns, what lies beside the points, and what is refused."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.models.cutting.points import cut_model, first_argument


class Model(nn.Module):
    """Has parameters before, around, between and behind its blocks."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 2)
        self.place = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.drop = nn.Dropout()
        self.body = nn.Module()
        self.body.scale = nn.Parameter(torch.ones(1))
        self.body.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
        self.middle = nn.Linear(2, 2)
        self.late = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norm = nn.LayerNorm(2)
        self.free = nn.ReLU()
        self.head = nn.Linear(2, 5)


def test_blocks_are_points_in_the_order_of_their_numbers_between_what_is_defined_before_and_behind_them():
    cut = cut_model(Model(), ["body.blocks.*", "late.*"])

    blocks = [f"body.blocks.{number}" for number in range(11)]
    assert cut.points == (*blocks, "middle", "late.0", "late.1", "norm", "head")
    assert cut.begin_modules == ("words",)
    assert cut.tensors == ("place", "mask", "body.scale")
    assert cut.has_begin


def test_lists_of_modules_and_of_parameters_are_looked_into():
    model = Model()
    model.early = nn.ModuleList([nn.Linear(2, 2)])
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    model.move = model._modules.pop("body")

    cut = cut_model(model, ["move.blocks.*"])

    assert cut.begin_modules == ("words", "middle", "late.0", "late.1", "norm", "head", "early.0")
    assert cut.tensors == ("place", "mask", "scales.0", "move.scale")


def test_a_star_stands_for_one_part_of_a_name():
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))

    assert cut_model(nested, ["*.0"]).points == ("0.0", "1.0")
    assert cut_model(nested, ["*"]).points == ("0", "1")


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], "expected a list"),
        ("body.blocks.*", "expected a list"),
        (["body.block.*"], "names no submodule of Model.* Did you mean 'body.blocks"),
        (["norm", "norm"], "'norm' is named twice"),
        (["body", "body.blocks.0"], "'body.blocks.0' lies in 'body'"),
        (["body.blocks"], r"'body.blocks' is a ModuleList, which has no forward.*'body.blocks.\*'"),
    ],
)
def test_points_that_are_none_are_refused(points, words):
    with pytest.raises(ConfigError, match=words):
        cut_model(Model(), points)


def test_a_point_that_is_called_without_arguments_is_refused():
    assert first_argument((), {"hidden": 1, "mask": 2}, nn.Identity()) == (1, (), {"mask": 2})
    with pytest.raises(
        PenstockError, match="a Identity is called without arguments; a point takes what came before it"
    ):
        first_argument((), {}, nn.Identity())


def test_a_module_that_was_compiled_is_no_container():
    model = Model()
    model.middle = torch.compile(model.middle)

    assert "middle" in cut_model(model, ["body.blocks.*"]).points
