"""The state of a rank's layers and of the whole model: taken, gathered, scattered, loaded or refused."""

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    WIDTH,
    block,
    error_of,
    float_layers,
    float_task,
    on_ranks,
    settle,
    square_loss,
    step_task,
    two_routes,
)
from tests.support.using import Using


def normed():
    """Return a layer with buffers, of which one is not saved, and with a parameter of other type."""
    return Using(
        lambda self, x: self.norm(x) * self.scale,
        norm=nn.BatchNorm1d(WIDTH),
        scale=nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16)),
        table=nn.Buffer(torch.zeros(3), persistent=False),
        nothing=nn.Buffer(torch.zeros(0)),
    )


def layers_of(seed):
    found = [block(seed), normed(), block(seed + 1), nn.Linear(WIDTH, WIDTH)]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in found:
            for tensor in layer.state_dict().values():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 5)
    return found


def pipeline_of(wires, layers, schedule="1f1b", **options):
    return Pipeline(layers, schedule, 4, square_loss, transport=wires, **options)


def assert_same_state(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_parts_of_the_ranks_are_the_state_of_the_unsplit_model(num_ranks):
    layers = layers_of(0)

    found = on_ranks(num_ranks, lambda wires: pipeline_of(wires, layers).state_dict())

    expected = nn.Sequential(*layers_of(0)).state_dict()
    assert found[-1]["3.weight"].data_ptr() == layers[3].weight.data_ptr()  # they are the layers' own tensors
    assert_same_state({name: value for part in found for name, value in part.items()}, expected)
    assert sum(map(len, found)) == len(expected)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_the_whole_state_is_gathered_on_one_rank(root):
    found = on_ranks(3, lambda wires: pipeline_of(wires, layers_of(0)).state_dict(on_rank=root))

    assert_same_state(found[root], nn.Sequential(*layers_of(0)).state_dict())
    assert [part for rank, part in enumerate(found) if rank != root] == [{}, {}]


def test_copies_of_a_stage_are_gathered_once():
    def case(wires):
        return pipeline_of(wires, float_layers(), two_routes(2, 4)).state_dict(on_rank=0)

    assert_same_state(on_ranks(2, case)[0], nn.Sequential(*float_layers()).state_dict())


@pytest.mark.parametrize("way", ["parts", "whole", "from rank 1"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_state_is_loaded(num_ranks, way):
    expected = nn.Sequential(*layers_of(1)).state_dict()

    def case(wires):
        pipeline = pipeline_of(wires, layers_of(0))
        if way == "from rank 1":
            pipeline.load_state_dict(expected if wires.rank == 1 else None, from_rank=1)
        elif way == "whole":
            pipeline.load_state_dict(expected)
        else:
            pipeline.load_state_dict({name: expected[name] for name in pipeline.state_dict()})
        return pipeline.state_dict(on_rank=0)

    assert_same_state(on_ranks(num_ranks, case)[0], expected)


def tied_layers(seed):
    layers = [settle(nn.Linear(WIDTH, WIDTH, bias=False), seed + index) for index in range(2)]
    layers.insert(1, block(seed))
    layers[2].weight = layers[0].weight
    return layers


def test_tied_copies_are_equal_after_loading_whatever_the_state_says():
    def case(wires):
        pipeline = pipeline_of(wires, tied_layers(0))
        state = nn.Sequential(*tied_layers(1)).state_dict()
        state["0.weight"], state["2.weight"] = torch.full((WIDTH, WIDTH), 1.0), torch.full((WIDTH, WIDTH), 2.0)
        pipeline.load_state_dict(state)
        return pipeline.state_dict()

    first, last = on_ranks(2, case)

    assert torch.equal(first["0.weight"], torch.full((WIDTH, WIDTH), 1.0))
    assert torch.equal(last["2.weight"], first["0.weight"])


@pytest.mark.parametrize("from_rank", [None, 1])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("3.weight"), "it lacks '3.weight'"),
        (lambda state: state.update({"3.wait": torch.zeros(1)}), "is named '3.wait'. Did you mean '3.weight'?"),
        (lambda state: state.update({"3.bias": torch.zeros(2)}), r"'3.bias' has the shape \(2,\); expected \(6,\)"),
        (lambda state: state.update({"3.bias": np.zeros(6)}), "'3.bias' is a ndarray; expected a tensor"),
        (lambda state: state.update({3: torch.zeros(6)}), "it has the key 3; expected names"),
        (lambda state: None, "a NoneType; expected tensors by name"),
    ],
)
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all_and_changes_nothing(change, told, from_rank):
    def case(wires):
        pipeline = pipeline_of(wires, layers_of(0))
        state = nn.Sequential(*layers_of(1)).state_dict()
        if wires.rank == 1:
            is_state = change(state) is not None or "NoneType" not in told
            state = state if is_state else None
        error = error_of(pipeline.load_state_dict, state, from_rank=from_rank)
        assert_same_state(pipeline.state_dict(on_rank=wires.rank * 0), {} if wires.rank else whole)
        step_task(pipeline, float_task(8))  # nothing is left on the way
        return error

    whole = nn.Sequential(*layers_of(0)).state_dict()

    for error in on_ranks(2, case):
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=told):
            raise error


def test_what_is_missing_or_unknown_is_left_where_loading_is_not_strict():
    state = {"3.weight": torch.ones(WIDTH, WIDTH), "9.weight": torch.ones(1)}

    def case(wires):
        pipeline = pipeline_of(wires, layers_of(0))
        pipeline.load_state_dict(state, strict=False)
        return pipeline.state_dict(on_rank=0)

    expected = nn.Sequential(*layers_of(0)).state_dict() | {"3.weight": state["3.weight"]}
    assert_same_state(on_ranks(2, case)[0], expected)
