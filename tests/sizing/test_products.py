"""Formulas of products agree with torch's counter where it has one, and with the papers' where it has none."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from penstock.sizing.products import products_of
from penstock.sizing.trace import Trace
from penstock.sizing.undocumented import FakeTensors, Operation

CONVOLUTION = {"stride": 2, "padding": 1}


def work_of(function, *shapes, dtype=torch.float32):
    """Return the work of a forward and of the backward of its sum."""
    with FakeTensors().making():
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with Trace() as trace:
        with trace.part() as forward:
            output = function(*inputs)
        with trace.part() as backward:
            output.backward(torch.ones_like(output))
    return forward.work(), backward.work()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(6, 4), (4, 5)]),
        (torch.bmm, [(3, 6, 4), (3, 4, 5)]),
        (F.linear, [(2, 6, 4), (5, 4), (5,)]),
        (torch.baddbmm, [(3, 6, 5), (3, 6, 4), (3, 4, 5)]),
        (lambda x, w: F.conv2d(x, w, **CONVOLUTION), [(2, 4, 9, 9), (6, 4, 3, 3)]),
        (lambda x, w: F.conv_transpose2d(x, w, **CONVOLUTION), [(2, 4, 9, 9), (4, 3, 3, 3)]),
        (F.conv1d, [(2, 4, 9), (6, 4, 3)]),
    ],
)
def test_products_are_those_that_torch_counts(function, shapes):
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        output = function(*inputs)
        forward_flops = counter.get_total_flops()
        output.backward(torch.ones_like(output))

    forward, backward = work_of(function, *shapes)

    assert forward.flops == forward_flops
    assert backward.flops == counter.get_total_flops() - forward_flops
    assert forward.unknown == backward.unknown == ()


def test_a_grouped_convolution_is_a_product_for_each_group():
    forward, backward = work_of(lambda x, w: F.conv1d(x, w, groups=2), (3, 4, 9), (6, 2, 3))

    assert forward.flops == 2 * 3 * 7 * 6 * 2 * 3
    assert backward.flops == 2 * forward.flops


def test_a_convolution_of_each_channel_by_itself_is_a_pass_over_its_tensors():
    forward, backward = work_of(lambda x, w: F.conv1d(x, w, groups=4), (3, 4, 9), (4, 1, 3))

    assert forward.products == backward.products == ()
    assert forward.moved_bytes == 4 * (3 * 4 * 9 + 4 * 3 + 3 * 4 * 7)
    assert forward.unknown == backward.unknown == ()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_two_products_and_five_in_a_backward_half_of_them_if_causal(is_causal):
    heads, length, size = 6, 32, 16

    forward, backward = work_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        *[(2, heads, length, size)] * 3,
        dtype=torch.bfloat16,
    )

    product = 2 * 2 * heads * length * length * size * (0.5 if is_causal else 1)
    assert [item.flops for item in forward.products] == [product] * 2
    assert [item.flops for item in backward.products] == [product] * 5
    assert {(item.kernel, item.data_type) for item in forward.products} == {("attention", "bfloat16")}


def test_a_grouped_product_is_one_of_the_mean_rows_for_each_group():
    offsets = torch.tensor([4, 16], dtype=torch.int32)

    forward, backward = work_of(
        lambda rows, weights: torch._grouped_mm(rows, weights, offs=offsets), (16, 8), (2, 8, 24), dtype=torch.bfloat16
    )

    assert forward.flops == 2 * 16 * 8 * 24
    assert backward.flops == 2 * forward.flops
    shapes = [(item.batch, item.rows, item.columns, item.inner) for item in (*forward.products, *backward.products)]
    assert sorted(shapes) == sorted([(2, 8, 24, 8), (2, 8, 8, 24), (2, 8, 24, 8)])
    assert {product.kernel for product in forward.products + backward.products} == {"grouped"}


@pytest.mark.parametrize(
    ("name", "namespace", "has_formula"),
    [
        ("add", "aten", True),
        ("_softmax", "aten", True),
        ("linalg_vector_norm", "aten", True),
        ("_scaled_mm", "aten", False),
        ("linalg_qr", "aten", False),
        ("_thnn_fused_lstm_cell", "aten", False),
        ("rotary", "my_kernels", False),
    ],
)
def test_an_operation_without_a_formula_is_told_from_one_that_only_passes_over_its_tensors(
    name, namespace, has_formula
):
    products = products_of(Operation(name, namespace, False), {}, [])

    assert products == ([] if has_formula else None)


def test_a_form_that_no_formula_knows_has_none():
    tensors = {"self": torch.zeros(2, 3, 4), "mat2": torch.zeros(4)}

    assert products_of(Operation("_grouped_mm", "aten", False), tensors, []) is None
