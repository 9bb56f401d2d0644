"""Gradients of a unit are one buffer per type; each replica gets the sum of its rows, and who used a parameter."""

import torch
from torch import nn

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.replicas.gathered import blocks_of
from penstock.execute.replicas.lane import ReplicaLane
from penstock.execute.replicas.packed_parts import parts_by_type
from penstock.execute.undocumented_backends import mesh_without_groups
from tests.local_pipelines import on_ranks, values


def packed_on(transport, layers, gradient_of):
    """Pack gradients on one replica, and return what it gets of their sums, by the shape of a parameter."""
    mesh = mesh_without_groups("data", transport.num_ranks, transport.rank)
    blocks, _ = blocks_of(layers, mesh)
    parameters = [each for block in blocks for each in block.parameters]
    store, lane = GradientStore(lambda: []), ReplicaLane(transport)
    for each in parameters:
        each.whole.grad = gradient_of(transport.rank, each.whole)
    packed, found = parts_by_type(parameters, store, lane), {}

    def take(parts):
        for own, part in zip(packed, parts, strict=True):
            found.update({shard: rows.clone() for shard, rows in own.unpacked(part)})

    lane.complete(lane.scatter([each.pack() for each in packed], take))
    assert all(each.whole.grad is None for each in parameters)
    return {tuple(shard.shape): rows for shard, rows in found.items()}


def test_each_replica_gets_its_rows_of_the_sum():
    def gradient_of(rank, whole):
        return values(rank + whole.dim(), *whole.shape).to(whole.dtype)

    def case(transport):
        return packed_on(transport, [nn.Linear(3, 5), nn.Linear(2, 1, dtype=torch.float64)], gradient_of)

    for rank, found in enumerate(on_ranks(3, case)):
        for shape, rows in found.items():
            terms = [values(each + len(shape), *shape).to(rows.dtype) for each in range(3)]
            expected = (terms[0] + terms[1] + terms[2]).chunk(3)
            assert torch.equal(rows, expected[rank] if rank < len(expected) else terms[0][:0])


def test_what_no_replica_has_used_comes_to_none_and_what_one_has_to_all():
    def gradient_of(rank, whole):
        return torch.ones_like(whole) if whole.dim() == 2 and rank == 1 else None

    for found in on_ranks(2, lambda transport: packed_on(transport, [nn.Linear(3, 4)], gradient_of)):
        assert {shape: rows.tolist() for shape, rows in found.items()} == {(4, 3): [[1.0] * 3] * 2}


def test_sparse_gradients_become_dense():
    def gradient_of(rank, whole):
        return torch.sparse_coo_tensor([[rank]], torch.ones(1, 3), (4, 3), check_invariants=False)

    found = on_ranks(2, lambda transport: packed_on(transport, [nn.Embedding(4, 3)], gradient_of))

    assert found[0][4, 3].tolist() == [[1.0] * 3] * 2
    assert found[1][4, 3].tolist() == [[0.0] * 3] * 2
