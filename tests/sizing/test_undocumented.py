"""Canaries: torch computes shapes on fake tensors, and tells operations by their schemas."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.execute.undocumented import address_of
from penstock.models.cutting.undocumented import KernelMode
from penstock.sizing.undocumented import (
    FakeTensors,
    depends_on_values,
    is_fake,
    named_arguments,
    operation_of,
    run_operation,
)

HUGE = 2**20  # squared, in float32: 4 TiB


def fake(*shape, dtype=torch.float32):
    with FakeTensors().making():
        return torch.empty(*shape, dtype=dtype)


def test_fake_tensors_have_shapes_and_graphs_and_no_memory():
    fakes = FakeTensors()
    with fakes.making():
        weight = nn.Parameter(torch.empty(HUGE, HUGE))
        hidden = torch.empty(4, HUGE, requires_grad=True)

    product = hidden @ weight

    assert is_fake(product)
    assert product.shape == (4, HUGE)
    assert product.device.type == "cpu"
    product.backward(torch.empty_like(product))
    assert is_fake(weight.grad)
    assert weight.grad.untyped_storage().nbytes() == 4 * HUGE**2
    assert isinstance(weight, nn.Parameter)


def test_fake_tensors_compute_with_real_ones_and_real_ones_by_themselves_keep_their_values():
    total = fake(3) + torch.arange(3)

    assert is_fake(total)
    assert (torch.arange(3) + 1).tolist() == [1, 2, 3]


def test_attention_without_values_keeps_no_scores():
    with FakeTensors().making():
        query = torch.empty(1, 8, 4096, 64, requires_grad=True)
    sizes = []
    with saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    assert max(sizes) == query.numel()


def test_storages_of_fake_tensors_are_told_apart_and_say_when_they_go():
    tensor, other = fake(4), fake(4)
    assert address_of(tensor.untyped_storage()) == address_of(tensor[1:].untyped_storage())
    assert address_of(tensor.untyped_storage()) != address_of(other.untyped_storage())
    gone = []
    weakref.finalize(other.untyped_storage(), gone.append, True)
    view = other[1:]
    del other
    gc.collect()
    assert not gone
    del view
    gc.collect()
    assert gone


def test_an_operation_that_needs_values_says_so_also_as_a_cause():
    def wrapped():
        try:
            fake(3).nonzero()
        except Exception as error:
            raise ValueError("wrapped") from error

    with pytest.raises(ValueError, match="wrapped") as caught:
        wrapped()
    assert depends_on_values(caught.value)
    with pytest.raises(Exception, match="scalar") as caught:
        fake(()).item()
    assert depends_on_values(caught.value)
    assert not depends_on_values(ValueError("other"))


class _Calls(KernelMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((operation_of(function), named_arguments(function, args, kwargs or {})))
        return run_operation(function, args, kwargs or {})


def test_operations_have_names_and_their_arguments_too():
    operands = fake(2, 3), fake(3, 4)
    with _Calls() as mode:
        torch.mm(*operands).add_(1)

    (product, arguments), (addition, _) = mode.calls
    assert (product.name, product.namespace, product.changes_arguments) == ("mm", "aten", False)
    assert (arguments["self"].shape, arguments["mat2"].shape) == ((2, 3), (3, 4))
    assert addition.changes_arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [
        ((16, 8), (2, 8, 24), (16, 24)),
        ((8, 16), (16, 24), (2, 8, 24)),
        ((2, 16, 8), (2, 8, 24), (2, 16, 24)),
    ],
)
def test_a_grouped_product_has_its_shape_in_every_type(dtype, left, right, shape):
    fakes = FakeTensors()
    with fakes.making():
        operands = [torch.empty(size, dtype=dtype) for size in (left, right)]
    offsets = None if len(left) == len(right) == 3 else torch.tensor([8, 16], dtype=torch.int32)
    with _Calls():
        result = torch._grouped_mm(*operands, offs=offsets)

    assert (tuple(result.shape), result.dtype) == (shape, dtype)
