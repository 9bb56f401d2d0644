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
    assert described_state([stage(nn.Linear(2, 2))]) == described_state([stage(nn.Linear(2, 2))])  # other values


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


EACH_LAYER = [range(layer, layer + 1) for layer in range(4)]
ALONE = Placement.explicit([0] * 4, [[0, 1, 2, 3]])
FIRST_AND_LAST = [("0.weight", "3.weight"), ("0.bias", "3.bias"), ("1.weight", "0.weight")]


def counted(placement, rank, tied, layers=None, slices=EACH_LAYER):
    layers = layers or [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return count_parameters(assemble(layers, placement, slices, rank, device=torch.device("cpu"), tied=tied))


@pytest.mark.parametrize(
    ("placement", "rank", "tied", "of_stage", "shared", "copied"),
    [
        (
            ALONE,
            0,
            [("0.weight", "3.weight"), ("1.bias", "3.bias"), ("0.weight", "2.weight")],
            [[0, WEIGHT + BIAS], [1, WEIGHT + BIAS], [2, BIAS], [3, 0]],
            [[2, 0, WEIGHT], [3, 0, WEIGHT], [3, 1, BIAS]],
            [],
        ),
        (Placement.line(4), 0, FIRST_AND_LAST, [[0, WEIGHT + BIAS]], [], []),
        (Placement.line(4), 3, FIRST_AND_LAST, [[3, WEIGHT + BIAS]], [], [[3, 0, WEIGHT + BIAS]]),
        (
            Placement.explicit([0, 1, 0, 1], [[0, 1, 2, 3]]),
            1,
            [("0.weight", "1.weight"), ("0.weight", "3.weight")],
            [[1, WEIGHT + BIAS], [3, BIAS]],
            [[3, 1, WEIGHT]],
            [[1, 0, WEIGHT]],
        ),
    ],
    ids=["shared by stages of a rank", "copied by another rank", "a copy", "a copy that stages share"],
)
def test_a_parameter_that_several_stages_hold_counts_in_the_first(placement, rank, tied, of_stage, shared, copied):
    assert counted(placement, rank, tied) == {"of_stage": of_stage, "shared": shared, "copied": copied, "frozen": []}


def test_of_a_stage_a_shared_parameter_counts_once_and_one_without_a_shape_not_yet():
    layers = [nn.Linear(2, 3), nn.LazyLinear(3), nn.Linear(3, 1, bias=False), nn.Linear(1, 3)]
    layers[3].bias = layers[0].bias

    assert counted(ALONE, 0, [], layers)["of_stage"] == [[0, 9], [1, 0], [2, 3], [3, 3]]
    assert counted(Placement.line(1), 0, [], layers, [range(4)])["of_stage"] == [[0, 15]]
