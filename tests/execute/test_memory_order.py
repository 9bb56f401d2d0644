"""A tensor's dimensions are read off, sent and made in the order in which they lie in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.execute.memory_order import empty_in_order, is_order, memory_order, stored, written_out


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


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5).flatmap(
        lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))
    )
)
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


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], [0, 1, 2], [0, True], [0, "1"], [0, 1.0]])
def test_what_is_no_order_of_two_dimensions_is_told(order):
    assert not is_order(order, 2)


@pytest.mark.parametrize("order", [(), (0, 1), (1, 0)])
def test_an_order_names_every_dimension_once_or_none(order):
    assert is_order(order, 2)


def test_memory_holds_the_values_of_what_is_written_out():
    values = torch.tensor([1 + 2j, 3 - 4j])

    assert torch.equal(torch.view_as_real(written_out(values.conj())), torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    assert not written_out(values.conj().imag).is_neg()
    assert written_out(values) is values
