"""What a replica holds of a tensor."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from penstock.checkpoints.local_tensors import distributed_like, local_tensor_of
from penstock.errors import CheckpointError
from tests.checkpoints.layouts import places_of


def mesh_of(num_ranks, rank=0):
    return DeviceMesh("cpu", torch.arange(num_ranks), _init_backend=False, _rank=rank)


def part(local, shape, mesh, placement):
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def test_a_plain_tensor_and_a_number_that_replicas_hold_alike_are_whole():
    parameter = nn.Parameter(torch.ones(3, 2))

    held = local_tensor_of("w", parameter, places_of(1, 2))

    assert (held.shape, held.rows) == ((3, 2), None)
    assert held.local.data_ptr() == parameter.data_ptr()
    assert not held.local.requires_grad
    whole = torch.zeros(3, 2)
    assert held.place_in(whole) is whole
    assert distributed_like(torch.zeros(3, 2), whole) is whole

    number = local_tensor_of("w", part(torch.tensor(2.0), (), mesh_of(2), Replicate()), places_of(0, 2))
    assert (number.shape, number.rows, number.local.item()) == ((), None, 2.0)


def test_a_shard_is_its_rows_in_the_memory_of_the_model():
    local = torch.ones(2, 3)
    parameter = nn.Parameter(part(local, (5, 3), mesh_of(2, 1), Shard(0)))

    held = local_tensor_of("w", parameter, places_of(1, 2))

    assert (held.shape, held.rows) == ((5, 3), range(3, 5))
    assert type(held.local) is torch.Tensor
    assert held.local.data_ptr() == parameter.to_local().data_ptr()
    assert held.place_in(torch.arange(15).view(5, 3)).tolist() == [[9, 10, 11], [12, 13, 14]]


@pytest.mark.parametrize(
    ("local", "num_ranks", "placement"),
    [((5, 2), 2, Shard(1)), ((3, 4), 3, Shard(0)), ((1, 4), 2, Shard(0))],
    ids=["columns", "over other ranks", "too few rows"],
)
def test_another_dtensor_is_refused_by_its_name(local, num_ranks, placement):
    tensor = part(torch.ones(local), (5, 4), mesh_of(num_ranks), placement)

    with pytest.raises(CheckpointError) as raised:
        local_tensor_of("w", tensor, places_of(0, 2))

    assert f"'w' is a DTensor of shape (5, 4) with the placements ({placement!r},), of which this rank has" in str(
        raised.value
    )
    assert "expected rows over the 2 replicas of the pipeline" in str(raised.value)


def test_what_is_made_alike_has_the_rows_it_was_given_and_its_own_type():
    like = nn.Parameter(part(torch.ones(2, 3), (5, 3), mesh_of(2, 1), Shard(0)))
    local = torch.full((2, 3), 7.0, dtype=torch.float64)

    made = distributed_like(like, local)

    assert isinstance(made, DTensor)
    assert (made.shape, made.stride(), made.placements) == (like.shape, like.stride(), like.placements)
    assert made.dtype is torch.float64
    assert torch.equal(made.to_local(), local)
    assert local_tensor_of("w", made, places_of(1, 2)).rows == range(3, 5)


def test_a_wrapped_tensor_of_several_dimensions_of_a_mesh_is_refused():
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False, _rank=0)
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate()], run_check=False)

    with pytest.raises(CheckpointError, match="is a DTensor of shape"):
        local_tensor_of("w", tensor, places_of(0, 4))
