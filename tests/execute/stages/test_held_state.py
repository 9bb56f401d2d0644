"""What a stage holds is described by names, shapes and types, and listed once."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.replicas.mesh import local_mesh
from penstock.execute.stages.held_state import described_state, held_tensors, require_equal_replicas
from penstock.execute.stages.stage import Stage
from tests.local_pipelines import error_of


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
