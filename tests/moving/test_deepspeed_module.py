"""Lists of specs, modules and functions become layers, and the partition methods become weights."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.moving.deepspeed_module import FunctionLayer, LayerSpec, PipelineModule, TiedLayerSpec
from tests.support.local_pipelines import error_of

LAYERS = [
    LayerSpec(nn.Embedding, 10, 4),
    LayerSpec(nn.TransformerEncoderLayer, 4, nhead=2, dim_feedforward=8),
    nn.Linear(4, 4),
    torch.tanh,
]


@pytest.mark.feature("X28")
def test_the_methods_weigh_layers_by_number_parameters_and_type():
    frozen = nn.Linear(4, 4).requires_grad_(False)

    assert PipelineModule(LAYERS, partition_method="uniform").weights == [1.0] * 4
    assert PipelineModule([*LAYERS, frozen]).weights == [40.0, 172.0, 20.0, 0.0, 0.0]
    assert PipelineModule(LAYERS, partition_method="type:transformer|LINEAR").weights == [0.0, 1.0, 1.0, 0.0]
    assert PipelineModule(LAYERS, partition_method=[3, 1, 1, 0]).weights == [3.0, 1.0, 1.0, 0.0]


def test_counting_parameters_allocates_nothing():
    huge = LayerSpec(nn.Linear, 1_000_000, 1_000_000, bias=False)

    assert PipelineModule([huge]).weights == [1e12]


@pytest.mark.parametrize(
    ("layers", "method", "text"),
    [
        ([], "uniform", "layers: is empty"),
        (LAYERS, "unifrom", "'unifrom'; expected uniform, parameters, type:regex"),
        (LAYERS, "type:conv", "no layer's class is named like 'conv'; they are Embedding, Linear"),
    ],
)
def test_what_cannot_be_divided_is_refused(layers, method, text):
    error = error_of(PipelineModule, layers, partition_method=method)

    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_layers_are_named_by_their_index_and_functions_are_layers():
    specs = PipelineModule(LAYERS, base_seed=3).specs()

    assert [specs[0].name, specs[1].name, specs[3].name] == ["0", "1", "3"]
    assert specs[2] is LAYERS[2]
    assert torch.equal(specs[3]()(torch.ones(2)), torch.ones(2).tanh())


def test_first_values_depend_on_the_seed_and_the_place_alone():
    first, again, other = (PipelineModule(LAYERS, base_seed=seed).specs()[0]().weight for seed in (3, 3, 4))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.feature("X29")
def test_tied_layers_name_the_first_of_their_key():
    def logits(module, hidden):
        return hidden @ module.weight.t()

    layers = [
        TiedLayerSpec("embed", nn.Embedding, 10, 4),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("embed", nn.Embedding, 10, 4, forward_fn=logits),
        TiedLayerSpec("other", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
        TiedLayerSpec("other", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
    ]

    tied = [spec.tied for spec in PipelineModule(layers).specs()]

    assert tied == [
        (),
        (),
        (("module.weight", "0.weight"),),
        (),
        (("weight", "3.weight"), ("bias", "3.bias")),
    ]
    head = PipelineModule(layers).specs()[2]()
    assert isinstance(head, FunctionLayer)
    assert head(torch.ones(1, 4)).shape == (1, 10)


def test_tied_layers_of_one_key_share_as_many_names():
    layers = [
        TiedLayerSpec("k", nn.Linear, 4, 4),
        TiedLayerSpec("k", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
    ]

    assert "name as many in each" in str(error_of(PipelineModule(layers).specs))
