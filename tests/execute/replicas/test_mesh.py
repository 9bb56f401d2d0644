"""Threads make a mesh too, and a mesh says which schedules fit it; those of processes: test_replica_processes.py."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import build
from penstock.errors import ConfigError
from penstock.execute.replicas.mesh import MeshRanks, read_mesh, require_sizes
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import assert_errors, error_of, float_layers, square_loss
from tests.support.mesh_pipelines import local_mesh, on_mesh


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (None, "mesh: its dimensions have no names; make it with mesh_dim_names="),
        (("tensor",), "mesh: the dimension 'tensor' cannot be used yet; the dimensions are 'data' and 'pipeline'"),
        (("dat",), "mesh: the dimension 'dat' is unknown. Did you mean 'data'?"),
        (("pipeline",), "mesh: there is no process group; call init_device_mesh on every rank"),
    ],
    ids=["no names", "reserved", "unknown", "no group"],
)
def test_a_mesh_that_names_no_ranks_is_refused(names, told):
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=names, _init_backend=False, _rank=0)

    error = error_of(Pipeline, float_layers(), loss=square_loss, mesh=mesh)

    assert type(error) is ConfigError
    assert told in str(error)


def test_threads_are_numbered_replica_by_replica():
    mesh = local_mesh(pipeline=2, data=3)

    places = [(each.pipeline.rank, each.replica) for each in mesh]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert mesh[5].name == "rank 5 (pipeline 1, data 2)"
    assert {places.num_replicas for places in mesh} == {3}
    assert str(MeshRanks([[0, 2], [1, 3]])) == "data 2 x pipeline 2 of the ranks [[0, 2], [1, 3]]"
    alone = local_mesh(pipeline=2)[1]
    assert (alone.data, alone.name) == (None, "rank 1")


@pytest.mark.parametrize(
    ("num_ranks", "advice"),
    [(4, "Make it data 1 x pipeline 4"), (1, "Make it data 4 x pipeline 1"), (3, "multiple of 3")],
)
def test_a_schedule_for_other_ranks_names_the_sizes_that_fit(num_ranks, advice):
    error = error_of(require_sizes, local_mesh(pipeline=2, data=2)[0], num_ranks)

    assert isinstance(error, ConfigError)
    assert advice in str(error)
    with pytest.raises(ConfigError, match="expected a DeviceMesh"):
        read_mesh((2, 2))


def test_a_schedule_that_does_not_fit_is_refused_on_every_rank():
    schedule = build("1f1b", ranks=4, microbatches=4)

    errors = on_mesh(2, 2, lambda places: error_of(Pipeline, float_layers(), schedule, loss=square_loss, mesh=places))

    assert_errors(errors, ConfigError, "is for 4 ranks, but 'pipeline' has 2 of the 4")


class TrainedLoss(nn.Module):
    """A loss that scales outputs by a parameter, and may use one of a layer too."""

    def __init__(self, head=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = head

    def forward(self, output, target, **options):
        return square_loss(output * self.scale, target)


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: partial(loss, weight=None)])
def test_a_loss_with_trainable_parameters_is_refused_on_every_rank_of_replicas(wrap):
    def case(places):
        layers = float_layers()
        return error_of(Pipeline, layers, "1f1b", 4, wrap(TrainedLoss(layers[-1])), mesh=places)

    told = "TrainedLoss has trainable parameters that are of no layer here (scale)"
    assert_errors(on_mesh(2, 2, case), ConfigError, told, "put them into the last layer")


@pytest.mark.parametrize("data", [1, 2])
def test_a_loss_whose_parameters_are_frozen_or_of_one_replica_is_taken(data):
    def case(places):
        layers = float_layers()
        loss = TrainedLoss(layers[-1])
        loss.scale.requires_grad_(data == 1)
        with Pipeline(layers, "1f1b", 4, loss, mesh=places) as pipeline:
            return pipeline.rank, pipeline.replica, pipeline.num_replicas

    assert on_mesh(2, data, case) == [(rank, replica, data) for replica in range(data) for rank in range(2)]
