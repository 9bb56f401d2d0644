"""A tensor's dimensions are read off, sent and made in the order in which they lie in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.errors import PipelineError
from penstock.execute.values.tensors import (
    empty_in_order,
    in_own_memory,
    in_pieces,
    is_dtensor,
    is_order,
    local_part,
    memory_order,
    stored,
    written_out,
)
from tests.support.ranks import run_ranks


def made(shape, order):
    return empty_in_order(shape, order, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.zeros(2, 3), ()),
        (torch.zeros(2, 3).T, (1, 0)),
        (torch.zeros(2, 4, 3, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.zeros(1, 4, 3, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.zeros(2, 4, 1, 1).to(memory_format=torch.channels_last), ()),
        (torch.zeros(()), ()),
        (torch.zeros(0, 3).T, ()),
        (torch.zeros(2, 6)[:, ::2], ()),
        (torch.zeros(2, 1).expand(2, 3), ()),
    ],
    ids=["plain", "transposed", "channels last", "one picture", "one pixel", "scalar", "empty", "gaps", "expanded"],
)
def test_the_order_of_a_dense_tensor_is_read_off_its_strides(tensor, order):
    assert memory_order(tensor) == order


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_what_lies_in_an_order_is_stored_without_gaps_and_made_the_same(shape_and_order):
    shape, order = shape_and_order
    given_tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape([shape[d] for d in order])
    tensor = given_tensor.permute([order.index(dim) for dim in range(len(shape))])

    found = memory_order(tensor)
    other = made(tensor.shape, found)
    stored(other, found).copy_(stored(tensor, found))

    assert stored(tensor, found).is_contiguous()
    assert stored(other, found).is_contiguous()
    assert torch.equal(other, tensor)


def test_an_order_names_every_dimension_once_or_none():
    orders, others = [(), (0, 1), (1, 0)], [[0], [0, 0], [1, 2], [0, 1, 2], [0, True], [0, "1"], [0, 1.0]]

    assert [order for order in (*orders, *others) if is_order(order, 2)] == orders


def test_memory_holds_the_values_of_what_is_written_out():
    values = torch.tensor([1 + 2j, 3 - 4j])

    assert torch.equal(torch.view_as_real(written_out(values.conj())), torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    assert not written_out(values.conj().imag).is_neg()
    assert written_out(values) is values


def look_at_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    gathered = (sharded + 1).redistribute(placements=sharded.placements)
    with pytest.raises(PipelineError, match="cannot travel between stages"):
        written_out(sharded)
    part = local_part(gathered)
    return is_dtensor(sharded), type(part).__name__, part.tolist(), part.requires_grad


def test_the_local_part_of_a_dtensor_is_a_plain_tensor_without_a_graph_and_that_of_others_is_the_tensor():
    plain = torch.ones(2)

    assert local_part(plain) is plain
    assert not is_dtensor(plain)
    assert run_ranks(2, look_at_dtensor) == [(True, "Tensor", [1.0, 2.0], False), (True, "Tensor", [3.0, 4.0], False)]


def test_the_gradient_of_an_input_is_copied_only_where_others_hold_its_memory():
    alone, held = torch.ones(2), torch.ones(2)
    other = held[:1]

    assert in_own_memory(alone) is alone
    assert in_own_memory(held) is not held
    assert in_own_memory(held).untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([], []),
        ([4], [[4]]),
        ([9, 1, 9], [[9], [1], [9]]),
        ([2, 2, 1, 1, 3], [[2, 2, 1], [1, 3]]),
        ([5, 0, 0], [[5, 0, 0]]),
    ],
)
def test_small_things_go_together_and_a_large_one_by_itself(sizes, pieces):
    assert list(in_pieces(sizes, int, 5)) == pieces
