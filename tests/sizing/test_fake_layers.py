"""Fake layers have the shapes of a model's, and never its memory."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from penstock.errors import PartitionError
from penstock.models import LayerSpec
from penstock.sizing.fake_layers import FakeLayers
from penstock.sizing.undocumented import is_fake

HUGE = 2**20  # squared: 4 TiB in float32


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("positions", torch.arange(4))


@pytest.mark.parametrize(
    "layer", [LayerSpec("big", lambda: nn.Linear(HUGE, HUGE)), lambda: nn.Linear(HUGE, HUGE)], ids=["spec", "callable"]
)
def test_a_layer_that_no_machine_could_hold_is_built(layer):
    module = FakeLayers().build(layer, "big")

    assert is_fake(module.weight)
    assert module.weight.requires_grad
    assert module.weight.untyped_storage().nbytes() == 4 * HUGE**2


def test_a_module_stays_as_it_is_and_its_copy_has_no_values_but_those_of_buffers():
    layer = Table().eval()

    module = FakeLayers().build(layer, "table")

    assert not is_fake(layer.weight)
    assert not layer.training
    assert is_fake(module.weight)
    assert module.training
    assert (module.weight.requires_grad, module.frozen.requires_grad) == (True, False)
    assert module.positions.tolist() == [0, 1, 2, 3]


def test_a_recipe_that_copies_a_module_has_no_values_but_those_of_buffers():
    """A function of a run file that returns modules makes such recipes."""
    module = FakeLayers().build(LayerSpec("table", partial(deepcopy, Table())), "table")

    assert is_fake(module.weight)
    assert (module.weight.requires_grad, module.frozen.requires_grad) == (True, False)
    assert module.positions.tolist() == [0, 1, 2, 3]


def test_a_type_is_that_of_parameters_alone():
    module = FakeLayers(torch.bfloat16).build(Table(), "table")

    assert (module.weight.dtype, module.positions.dtype) == (torch.bfloat16, torch.int64)


def test_layers_that_share_a_parameter_go_on_to_share_it():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    fake_layers = FakeLayers()

    modules = [fake_layers.build(layer, name) for layer, name in ((first, "a"), (second, "b"))]

    assert modules[0].weight is modules[1].weight


def fails():
    raise ValueError("no such file")


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (fails, "'x' cannot be built without values: ValueError: no such file"),
        (lambda: 3, "'x' builds a int"),
        (Lazy(), "'x' has a parameter without a shape"),
    ],
)
def test_what_is_no_layer_is_refused_by_name(layer, words):
    with pytest.raises(PartitionError, match=words):
        FakeLayers().build(layer, "x")
