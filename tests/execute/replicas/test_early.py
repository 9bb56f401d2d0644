"""A layer is sharded when all replicas have built it; its parameters keep their shapes and no memory."""

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.execute.control.collectives import Control
from penstock.execute.replicas.early import EarlyShards, early_rows
from tests.support.local_pipelines import error_of, settle
from tests.support.mesh_pipelines import on_mesh


def agree(places, built, **options):
    return EarlyShards(Control.of(places), torch.device("cpu")).agree("7", built, **{"is_separate": True} | options)


def test_each_replica_keeps_its_rows_of_the_first_ones_values():
    def case(places):
        shared = agree(places, nn.Linear(3, 5), is_separate=places.replica == 0)
        assert early_rows(shared.weight) is None  # what may share something on any replica stays whole
        layer = agree(places, settle(nn.Linear(3, 5), 1 + places.replica))
        shape, memory = tuple(layer.weight.shape), layer.weight.untyped_storage().nbytes()
        return early_rows(layer.weight)[1].clone(), shape, memory

    found = on_mesh(1, 2, case)

    weight = settle(nn.Linear(3, 5), 1).weight
    assert torch.equal(torch.cat([part for part, _, _ in found])[:15].view(5, 3), weight)
    assert [(shape, memory) for _, shape, memory in found] == [((5, 3), 4)] * 2


def test_a_failure_of_one_replica_is_one_of_all():
    def case(places):
        built = PartitionError("it cannot be") if places.replica == 1 else nn.Linear(2, 2)
        return error_of(agree, places, built)

    first, second = on_mesh(1, 2, case)

    assert str(second) == "it cannot be"
    assert str(first).endswith("(pipeline 0, data 1): it cannot be")
