"""The weight gradients of a product in a graph are autograd's own, bit for bit; it sees what changes what it keeps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.execute.split.products import NODES, read_call
from penstock.execute.split.weight_graph import WeightGraph
from tests.execute.split.test_formulas import CALLS, MATRIX, TOKENS, needing_gradients
from tests.local_pipelines import values

CASES = {
    **CALLS,
    "transposed convolution": (
        F.conv_transpose2d,
        (values(1, 2, 4, 5, 5), values(2, 4, 6, 3, 3)),
        {"stride": 2, "output_padding": 1, "bias": values(3, 6)},
    ),
    "complex matrices": (torch.mm, (values(1, 3, 5) + 0j, values(2, 5, 4) * 1j), {}),
    "complex batches": (torch.bmm, (values(1, 2, 3, 5) + 0j, values(2, 2, 5, 4) * 1j), {}),
}


def read_node(node):
    reader = NODES.get(type(node).__name__)
    return None if reader is None else reader(node, WeightGraph())


def product_in(output):
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if (product := read_node(node)) is not None:
            return node, product
        waiting += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError("no product")


def leaf(value):
    is_tensor = isinstance(value, torch.Tensor)
    return nn.Parameter(value.detach()) if is_tensor and (value.is_floating_point() or value.is_complex()) else value


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_a_product_are_those_of_autograd(name):
    function, args, kwargs = CASES[name]
    args, kwargs = [leaf(value) for value in args], {key: leaf(value) for key, value in kwargs.items()}
    output = function(*args, **kwargs)
    _, product = product_in(output)
    late = []
    product.watch(late)
    gradient = values(9, *output.shape).to(output.dtype)
    output.backward(gradient, inputs=[each for each in args if isinstance(each, torch.Tensor) and each.requires_grad])
    product.release()

    expected = torch.autograd.grad(function(*args, **kwargs), sides(name, args, kwargs), gradient)
    found = gradients_through(product, sides(name, args, kwargs))

    assert late == [product]
    assert all(map(torch.equal, found, expected))
    assert [each.stride() for each in found] == [each.stride() for each in expected]


def sides(name, args, kwargs):
    """The weights of a call."""
    if "conv" in name:
        return [each for each in (*args[1:3], kwargs.get("bias")) if isinstance(each, torch.Tensor)]
    return [args[2] if name == "addmm" else args[1]]


def gradients_through(product, weights):
    for weight in weights:
        weight.grad = None
    gradients = product.gradients()
    assert len(gradients) == len(product.roots) == len(weights)
    torch.autograd.backward(product.roots, gradients)
    return [weight.grad for weight in weights]


@pytest.mark.parametrize(
    "output",
    [
        lambda: F.linear(values(1, 2, 5), values(2, 4, 5)),
        lambda: torch.addmm(values(3, 4), values(1, 3, 5), leaf(values(2, 5, 4)), beta=2),
        lambda: values(1, 3, 5) + values(2, 3, 5),
        lambda: torch.bmm(leaf(values(1, 2, 3, 5)), values(2, 2, 5, 4)),
    ],
)
def test_what_has_no_weights_or_no_known_formula_is_none(output):
    output = output()

    assert output.grad_fn is None or read_node(output.grad_fn) is None


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_of_a_convolution_and_its_bias_only_the_trained_one_is_deferred(trained):
    operands = [
        nn.Parameter(each, requires_grad=is_trained)
        for each, is_trained in zip((values(2, 6, 4, 3), values(3, 6)), trained, strict=True)
    ]
    output = F.conv1d(values(1, 2, 4, 9), *operands)
    _, product = product_in(output)
    product.watch([])
    gradient = values(9, *output.shape)
    output.backward(gradient, inputs=product.ends(hands_over=False))
    product.release()

    weights = [each for each in operands if each.requires_grad]
    expected = torch.autograd.grad(F.conv1d(values(1, 2, 4, 9), *operands), weights, gradient)

    assert all(map(torch.equal, gradients_through(product, weights), expected))


def test_activations_that_others_keep_are_told():
    weight, hidden = nn.Parameter(values(2, 5, 4)), leaf(values(1, 3, 5))

    found = [
        product_in(run(hidden))[1].is_kept_elsewhere
        for run in (lambda x: x @ weight, lambda x: checkpoint(lambda y: y @ weight, x, use_reentrant=False))
    ]

    assert found == [False, True]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.linear, (values(1, 5), values(2, 4, 5)), {}),
        (torch.matmul, (values(1, 5), MATRIX), {}),
        (torch.matmul, (values(1, 2, 3, 5), values(2, 1, 5, 4)), {}),
        (torch.mm, (values(1, 3, 5), MATRIX), {"out": torch.empty(3, 4)}),
        (torch.bmm, (values(1, 2, 3, 5), values(2, 2, 5, 4)), {"out": torch.empty(2, 3, 4)}),
        (torch.addmm, (values(3, 4), values(1, 3, 5), MATRIX), {"beta": 2}),
        (F.conv2d, (values(1, 4, 7, 6), values(2, 6, 4, 3, 2)), {}),
        (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 4, 3, 2)), {"padding": "same"}),
        (F.embedding, (TOKENS, values(2, 6, 4)), {"max_norm": 1.0}),
        (torch.add, (values(1, 5), values(2, 5)), {}),
        (torch.matmul, (values(1, 3, 5).to_sparse(), MATRIX), {}),
    ],
)
def test_what_has_no_known_formula_is_no_product(function, args, kwargs):
    assert read_call(function, needing_gradients(args), kwargs) is None


@pytest.mark.parametrize("function", [F.linear, torch.matmul])
def test_a_frozen_weight_makes_no_product(function):
    assert read_call(function, (values(1, 2, 3, 3), values(2, 3, 3)), {}) is None


def test_a_product_after_nothing_but_its_weights_is_an_end():
    weight = nn.Parameter(values(2, 5, 4))

    ends = [
        len(read_node((hidden @ weight).grad_fn).ends(hands_over=False))
        for hidden in (values(1, 3, 5), values(1, 3, 5).requires_grad_())
    ]

    assert ends == [1, 0]


@pytest.mark.parametrize("is_changed", [False, True])
def test_activations_that_are_changed_in_place_before_the_weight_part_are_told(is_changed):
    activations, weight = values(1, 3, 5), nn.Parameter(values(2, 5, 4))
    output = activations @ weight
    product = read_node(output.grad_fn)
    product.watch([])
    output.backward(values(3, 3, 4), inputs=product.ends(hands_over=False))
    product.release()
    expected = activations.t() @ values(3, 3, 4)
    if is_changed:
        activations[0] = 0.0
        with pytest.raises(PipelineError, match=r"\(3, 5\).* were changed in place .* at version 1, expected 0"):
            product.gradients()
    else:
        assert torch.equal(product.gradients()[0], expected)
