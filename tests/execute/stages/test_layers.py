"""A layer's name, and building it."""

import pytest
import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.execute.stages.layers import build_layer, layer_names
from penstock.models import LayerSpec

SPECS = [LayerSpec("in", nn.Identity), LayerSpec("mid.0", nn.Identity)]


def test_a_layer_is_named_by_its_spec_or_else_by_its_place():
    named_module = nn.Linear(6, 6)
    named_module.name = "of the module itself"

    assert layer_names([*SPECS, named_module, lambda: nn.ReLU()]) == ["in", "mid.0", "2", "3"]
    assert layer_names([*SPECS, nn.Identity()], ["a", "b", "c"]) == ["in", "mid.0", "c"]  # of a container


def test_two_layers_of_one_name_are_refused():
    with pytest.raises(PartitionError, match="2 layers are named 'in'"):
        layer_names([*SPECS, SPECS[0]])


def test_a_module_is_used_in_place_and_copied_with_a_memory():
    layer, memory = nn.Linear(2, 2), {}

    assert build_layer(layer, "0") is layer
    copied = build_layer(layer, "0", memory)
    assert copied is not layer
    assert build_layer(layer, "0", memory) is copied


def test_what_builds_no_module_is_refused():
    with pytest.raises(PartitionError, match=r"layer '3' builds a str; expected an nn\.Module"):
        build_layer(lambda: "a text", "3")


def test_a_layer_that_does_not_fit_in_memory_is_named():
    with pytest.raises(PartitionError, match="layer '0' does not fit in this rank's memory"):
        build_layer(lambda: nn.Linear(2**40, 2**20), "0")


@pytest.mark.parametrize("make", [lambda layer: layer, lambda layer: lambda: layer], ids=["module", "builder"])
def test_a_layer_without_values_is_refused_with_what_to_do(make):
    with torch.device("meta"):
        empty = nn.Linear(6, 6)

    with pytest.raises(PartitionError, match=r"layer '1' is on the meta device, .* a LayerSpec, or call its to_empty"):
        build_layer(make(empty), "1")
