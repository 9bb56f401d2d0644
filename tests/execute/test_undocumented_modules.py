"""Where modules hold their parameters and submodules; nothing that a walk would find is overlooked."""

import pytest
import torch
from torch import nn

from penstock.execute.undocumented_modules import ModuleSnapshot


def some_layers():
    return [nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)]


def replace_parameter(layers):
    layers[1].bias = nn.Parameter(torch.zeros(2))


def replace_parameter_by_converting(layers):
    layers[0].to_empty(device="meta")  # without setattr


def remove_parameter(layers):
    layers[1].bias = None


def rename_parameter(layers):
    layers[1].register_parameter("offset", layers[1].bias)
    del layers[1].bias


def move_parameter_to_next_module(layers):
    layers[0][1].register_parameter("bias", layers[0][0].bias)
    del layers[0][0].bias


def add_parameter(layers):
    layers[0][1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def replace_module(layers):
    layers[0][0] = nn.Linear(2, 2)


def add_module_to_a_leaf(layers):
    layers[0][1].add_module("inner", nn.Linear(2, 2))


def parametrize_weight(layers):
    nn.utils.parametrizations.weight_norm(layers[1])


def exchange_tables(layers):
    layers[1].__setstate__({**vars(layers[1]), **vars(nn.Linear(2, 2))})


CHANGES = [
    replace_parameter,
    replace_parameter_by_converting,
    remove_parameter,
    rename_parameter,
    move_parameter_to_next_module,
    add_parameter,
    replace_module,
    add_module_to_a_leaf,
    parametrize_weight,
    exchange_tables,
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_seen(change):
    layers = some_layers()
    snapshot = ModuleSnapshot(layers)
    assert snapshot.is_current()

    change(layers)

    assert not snapshot.is_current()
    assert ModuleSnapshot(layers).is_current()


def test_values_and_what_is_frozen_are_no_part_of_it():
    layers = some_layers()
    snapshot = ModuleSnapshot(layers)

    layers[1].weight.requires_grad_(False)
    layers[0].load_state_dict({name: torch.ones_like(value) for name, value in layers[0].state_dict().items()})
    layers[0].double().eval()

    assert snapshot.is_current()


def test_parameters_are_those_of_the_layers_in_order():
    layers = some_layers()
    layers[1].weight = layers[0][0].weight

    found = ModuleSnapshot(layers).parameters

    assert list(map(id, found)) == [id(each) for layer in layers for each in layer.parameters()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_modules_that_torch_scripted_have_such_tables_too():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))

    assert len(ModuleSnapshot([scripted]).parameters) == 2
