"""The weight gradients of a product are autograd's own, bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from penstock.execute.split.products import read_call
from tests.local_pipelines import values

TOKENS = torch.tensor([[1, 4, 0], [4, 4, 2]])
MATRIX = values(3, 5, 4)
TRANSPOSED = values(3, 4, 5).t()
COLUMNS = values(1, 5, 2, 3).permute(1, 2, 0)
BFLOAT = [values(seed, *shape).bfloat16() for seed, shape in enumerate([(2, 2, 3, 5), (4, 5), (4,)])]

CALLS = {
    "linear": (F.linear, (values(1, 3, 5), values(2, 4, 5)), {}),
    "linear with a bias": (F.linear, (values(1, 2, 3, 5), values(2, 4, 5), values(3, 4)), {}),
    "linear over four dims": (F.linear, (values(1, 2, 2, 3, 5), values(2, 4, 5)), {"bias": values(3, 4)}),
    "linear of three dims": (F.linear, (values(1, 2, 3, 5), values(2, 4, 5), values(3, 4)), {}),
    "linear of what is not contiguous": (F.linear, (values(1, 3, 2, 5).transpose(0, 1), values(2, 4, 5)), {}),
    "the same with a bias": (F.linear, (values(1, 3, 2, 5).mT, values(2, 4, 2), values(3, 4)), {}),
    "linear of a slice": (F.linear, (values(1, 2, 3, 7)[..., :5], values(2, 4, 5), values(3, 4)), {}),
    "linear of rows that lie one beside the other": (F.linear, (COLUMNS, values(2, 4, 5)), {}),
    "the same with its bias": (F.linear, (COLUMNS, values(2, 4, 5), values(3, 4)), {}),
    "linear of an expanded row": (F.linear, (values(1, 5).expand(2, 3, 5), values(2, 4, 5), values(3, 4)), {}),
    "matmul of rows that lie one beside the other": (torch.matmul, (COLUMNS, MATRIX), {}),
    "linear in bfloat16": (F.linear, (BFLOAT[0], *BFLOAT[1:]), {}),
    "of a slice in bfloat16": (F.linear, (BFLOAT[0][..., :4], BFLOAT[1][:, :4].clone(), BFLOAT[2]), {}),
    "of a slice of rows in bfloat16": (F.linear, (BFLOAT[0][..., 1:, :], *BFLOAT[1:]), {}),
    "of what is not contiguous in bfloat16": (F.linear, (BFLOAT[0].transpose(0, 2), *BFLOAT[1:]), {}),
    "matmul of what is not contiguous": (torch.matmul, (values(1, 3, 5, 2).mT, MATRIX), {}),
    "matmul": (torch.matmul, (values(1, 2, 3, 5), MATRIX), {}),
    "the operator": (torch.Tensor.matmul, (values(1, 3, 5), MATRIX), {}),
    "matmul by a transposed weight": (torch.matmul, (values(1, 2, 3, 5), TRANSPOSED), {}),
    "batched matmul": (torch.matmul, (values(1, 2, 3, 5), values(2, 2, 5, 4)), {}),
    "mm": (torch.mm, (values(1, 3, 5), TRANSPOSED), {}),
    "mm as a method": (torch.Tensor.mm, (values(1, 3, 5), MATRIX), {}),
    "bmm": (torch.bmm, (values(1, 2, 3, 5), values(2, 2, 5, 4)), {}),
    "addmm": (torch.addmm, (values(3, 4), values(1, 3, 5), MATRIX), {}),
    "conv1d": (F.conv1d, (values(1, 2, 4, 9), values(2, 6, 4, 3), values(3, 6)), {"padding": 1}),
    "conv2d": (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 2, 3, 2), None, (2, 1), (1, 0), 1, 2), {}),
    "conv2d with a bias": (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 4, 3, 2), values(3, 6)), {"dilation": 2}),
    "conv3d": (F.conv3d, (values(1, 2, 2, 4, 4, 4), values(2, 3, 2, 2, 2, 2)), {"stride": [2]}),
    "embedding": (F.embedding, (TOKENS, values(2, 6, 4)), {}),
    "embedding with padding": (F.embedding, (TOKENS, values(2, 6, 4)), {"padding_idx": -2}),
    "embedding by frequency": (F.embedding, (TOKENS, values(2, 6, 4)), {"scale_grad_by_freq": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_gradients_of_a_product_are_those_of_autograd(name):
    function, args, kwargs = CALLS[name]
    args, kwargs = needing_gradients(args), dict(zip(kwargs, needing_gradients(kwargs.values()), strict=True))
    product = read_call(function, args, kwargs)
    part = product.formula.output(product.activations, product.weights, product.bias)
    gradient = values(9, *part.shape, dtype=part.dtype)

    found = product.formula.weight_gradients(gradient, product.activations, product.weights)
    found = [each for each in found if each is not None]

    expected, output = autograd_of(function, args, kwargs, product.weights, gradient)
    assert torch.equal(product.finish(part), output)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [name for name in CALLS if "embedding" not in name])
def test_the_gradients_of_activations_are_those_of_autograd(name):
    function, args, kwargs = CALLS[name]
    args, kwargs = needing_gradients(args), dict(zip(kwargs, needing_gradients(kwargs.values()), strict=True))
    product = read_call(function, args, kwargs)
    activations = product.activations.detach()
    output = product.formula.output(activations, product.weights, product.bias)
    gradient = values(9, *output.shape, dtype=output.dtype)

    found = product.formula.input_gradient(gradient, activations, product.weights)

    again = read_call(function, args, kwargs)
    (expected,) = torch.autograd.grad(
        function(*args, **kwargs), args[1 if name == "addmm" else 0], shaped(again, gradient)
    )
    assert torch.equal(found.reshape(expected.shape), expected)


def shaped(product, gradient):
    return gradient if product.shape is None else gradient.view(product.shape)


def needing_gradients(values):
    return [leaf(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in values]


def leaf(tensor):
    return tensor.detach().requires_grad_()


def autograd_of(function, args, kwargs, weights, gradient):
    """Return what autograd computes for the weights in a call, and the call's output."""
    leaf_of = {id(weight): leaf(weight) for weight in weights if weight is not None}
    args = [leaf_of.get(id(value), value) for value in args]
    output = function(*args, **{name: leaf_of.get(id(value), value) for name, value in kwargs.items()})
    output.backward(gradient.reshape(output.shape))
    return [leaf.grad for leaf in leaf_of.values()], output


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_only_the_gradients_that_are_needed_are_computed(needs):
    function, args, kwargs = CALLS["conv2d with a bias"]
    operands = [each.detach().requires_grad_(is_needed) for each, is_needed in zip(args[1:], needs, strict=True)]
    product = read_call(function, (args[0], *operands), kwargs)
    gradient = values(9, *function(*args, **kwargs).shape)

    found = product.formula.weight_gradients(gradient, product.activations, product.weights)

    expected = [each.shape if is_needed else None for each, is_needed in zip(operands, needs, strict=True)]
    assert [None if each is None else each.shape for each in found] == expected


def test_gradients_of_a_sparse_table_are_sparse():
    product = read_call(F.embedding, (TOKENS, values(2, 6, 4)), {"sparse": True})

    (found,) = product.formula.weight_gradients(values(9, 2, 3, 4), TOKENS, product.weights)

    assert found.is_sparse
    assert torch.equal(found.to_dense()[3], torch.zeros(4))
