"""Replicas hold the same; parameters are counted by stage, and each where it is held first."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.stages.assemble import assemble
from penstock.execute.stages.held_state import count_parameters, described_state, held_tensors, require_equal_replicas
from penstock.execute.stages.stage import Stage
from penstock.placement import Placement
from tests.support.local_pipelines import error_of
from tests.support.mesh_pipelines import local_mesh


def stage(*modules):
    return Stage(1, {str(index): module for index, module in enumerate(modules)})


def test_parameters_and_buffers_are_listed_once():
    shared, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    found = held_tensors([stage(shared, norm), stage(shared)])

    expected = [*shared.parameters(), *norm.parameters(), *norm.buffers()]
    assert [id(tensor) for tensor in found] == list(map(id, expected))


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(2, 3),
        nn.Linear(2, 2, bias=False),
        nn.Linear(2, 2, dtype=torch.float64),
        nn.Sequential(nn.Linear(2, 2)),
    ],
)
def test_another_name_shape_or_type_is_another_state(other):
    assert described_state([stage(other)]) != described_state([stage(nn.Linear(2, 2))])


def test_values_are_not_compared():
    assert described_state([stage(nn.Linear(2, 2))]) == described_state([stage(nn.Linear(2, 2))])


def test_a_lazy_parameter_is_refused():
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape"):
        described_state([stage(nn.LazyLinear(2))])


def test_the_rank_and_the_stage_that_differ_are_named():
    places = local_mesh(pipeline=2, data=2)[0]
    require_equal_replicas([{"0": 1}, {"1": 2}, {"0": 1}, {"1": 2}], places)

    error = error_of(require_equal_replicas, [{"0": 1}, {"1": 2}, {"0": 1}, {"1": 3}], places)

    assert "stage 1 holds other parameters or buffers on rank 3 (pipeline 1, data 1) than on rank 1" in str(error)


WIDTH = 4
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH


def counted(placement, slices, rank, tied=(), layers=None):
    layers = layers or [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return count_parameters(assemble(layers, placement, slices, rank, device=torch.device("cpu"), tied=tied))


def each_layer(num_stages=4):
    return [range(layer, layer + 1) for layer in range(num_stages)]


def test_a_parameter_that_stages_of_a_rank_share_counts_in_the_first():
    placement = Placement.explicit([0] * 4, [[0, 1, 2, 3]])
    tied = [("0.weight", "3.weight"), ("1.bias", "3.bias"), ("0.weight", "2.weight")]

    found = counted(placement, each_layer(), 0, tied)

    assert found == {
        "of_stage": [[0, WEIGHT + BIAS], [1, WEIGHT + BIAS], [2, BIAS], [3, 0]],
        "shared": [[2, 0, WEIGHT], [3, 0, WEIGHT], [3, 1, BIAS]],
        "copied": [],
    }


def test_a_parameter_that_layers_of_a_stage_share_counts_once():
    found = counted(Placement.line(1), [range(4)], 0, [("0.weight", "3.weight")])

    assert found == {"of_stage": [[0, 3 * WEIGHT + 4 * BIAS]], "shared": [], "copied": []}


def test_copies_of_another_rank_are_counted_and_named():
    tied = [("0.weight", "3.weight"), ("0.bias", "3.bias"), ("1.weight", "0.weight")]

    first, *_, last = (counted(Placement.line(4), each_layer(), rank, tied) for rank in range(4))

    assert first == {"of_stage": [[0, WEIGHT + BIAS]], "shared": [], "copied": []}
    assert last == {"of_stage": [[3, WEIGHT + BIAS]], "shared": [], "copied": [[3, 0, WEIGHT + BIAS]]}


def test_a_copy_that_stages_of_its_rank_share_counts_there_once():
    placement = Placement.explicit([0, 1, 0, 1], [[0, 1, 2, 3]])

    found = counted(placement, each_layer(), 1, [("0.weight", "1.weight"), ("0.weight", "3.weight")])

    assert found == {
        "of_stage": [[1, WEIGHT + BIAS], [3, BIAS]],
        "shared": [[3, 1, WEIGHT]],
        "copied": [[1, 0, WEIGHT]],
    }


def test_a_layer_that_waits_for_its_first_input_has_no_parameters_to_count_yet():
    layers = [nn.Linear(2, 3), nn.LazyLinear(3), nn.Linear(3, 1, bias=False)]
    placement = Placement.explicit([0] * 3, [[0, 1, 2]])

    assert counted(placement, each_layer(3), 0, layers=layers)["of_stage"] == [[0, 9], [1, 0], [2, 3]]
