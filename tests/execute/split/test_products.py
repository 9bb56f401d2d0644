"""The weight gradients of a product in a graph are autograd's own, bit for bit; it sees what changes what it keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.execute.split.products import NODES
from penstock.execute.split.weight_graph import WeightGraph
from tests.support.local_pipelines import values

TOKENS = torch.tensor([[1, 4, 0], [4, 4, 2]])
MATRIX = values(3, 5, 4)
TRANSPOSED = values(3, 4, 5).t()
COLUMNS = values(1, 5, 2, 3).permute(1, 2, 0)
BFLOAT = [values(seed, *shape).bfloat16() for seed, shape in enumerate([(2, 2, 3, 5), (4, 5), (4,)])]

CASES = {
    "linear": (F.linear, (values(1, 3, 5), values(2, 4, 5)), {}),
    "linear with a bias": (F.linear, (values(1, 2, 3, 5), values(2, 4, 5), values(3, 4)), {}),
    "linear over four dims": (F.linear, (values(1, 2, 2, 3, 5), values(2, 4, 5)), {"bias": values(3, 4)}),
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
    "matmul by a transposed weight": (torch.matmul, (values(1, 2, 3, 5), TRANSPOSED), {}),
    "batched matmul": (torch.matmul, (values(1, 2, 3, 5), values(2, 2, 5, 4)), {}),
    "mm": (torch.mm, (values(1, 3, 5), TRANSPOSED), {}),
    "bmm": (torch.bmm, (values(1, 2, 3, 5), values(2, 2, 5, 4)), {}),
    "addmm": (torch.addmm, (values(3, 4), values(1, 3, 5), MATRIX), {}),
    "conv1d": (F.conv1d, (values(1, 2, 4, 9), values(2, 6, 4, 3), values(3, 6)), {"padding": 1}),
    "conv2d": (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 2, 3, 2), None, (2, 1), (1, 0), 1, 2), {}),
    "conv2d with a bias": (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 4, 3, 2), values(3, 6)), {"dilation": 2}),
    "conv3d": (F.conv3d, (values(1, 2, 2, 4, 4, 4), values(2, 3, 2, 2, 2, 2)), {"stride": [2]}),
    "embedding": (F.embedding, (TOKENS, values(2, 6, 4)), {}),
    "embedding with padding": (F.embedding, (TOKENS, values(2, 6, 4)), {"padding_idx": -2}),
    "embedding by frequency": (F.embedding, (TOKENS, values(2, 6, 4)), {"scale_grad_by_freq": True}),
    "conv2d that keeps the size": (F.conv2d, (values(1, 2, 4, 7, 6), values(2, 6, 4, 3, 3)), {"padding": "same"}),
    "transposed convolution": (
        F.conv_transpose2d,
        (values(1, 2, 4, 5, 5), values(2, 4, 6, 3, 3)),
        {"stride": 2, "output_padding": 1, "bias": values(3, 6)},
    ),
    "complex matrices": (torch.mm, (values(1, 3, 5) + 0j, values(2, 5, 4) * 1j), {}),
    "complex batches": (torch.bmm, (values(1, 2, 3, 5) + 0j, values(2, 2, 5, 4) * 1j), {}),
    "sparse activations": (torch.mm, (values(1, 3, 5).to_sparse(), MATRIX), {}),
}


def read_node(node):
    reader = NODES.get(type(node).__name__)
    return None if reader is None else reader(node, WeightGraph())


def product_in(output):
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if (product := read_node(node)) is not None:
            return product
        waiting += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError("no product")


def released(output, gradient):
    """Run the part of a backward for inputs, past the product behind an output; return the product."""
    product = product_in(output)
    product.watch([])
    output.backward(gradient, inputs=product.target_edges(captures_gradients=False))
    product.release()
    return product


def leaf(value):
    is_tensor = isinstance(value, torch.Tensor)
    return nn.Parameter(value.detach()) if is_tensor and (value.is_floating_point() or value.is_complex()) else value


def again(function, *args, **kwargs):
    """Run a function whose saved tensors checkpointing keeps."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def on_cpu(function, *args, **kwargs):
    """Run a function whose saved tensors are moved away."""
    with save_on_cpu():
        return function(*args, **kwargs)


@pytest.mark.parametrize("run", [lambda function, *args, **kwargs: function(*args, **kwargs), again, on_cpu])
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_a_product_are_those_of_autograd(name, run):
    function, args, kwargs = CASES[name]
    args, kwargs = [leaf(value) for value in args], {key: leaf(value) for key, value in kwargs.items()}
    output = run(function, *args, **kwargs)
    product = product_in(output)
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
    gradient = values(9, *output.shape)
    product = released(output, gradient)

    weights = [each for each in operands if each.requires_grad]
    expected = torch.autograd.grad(F.conv1d(values(1, 2, 4, 9), *operands), weights, gradient)

    assert all(map(torch.equal, gradients_through(product, weights), expected))


def test_gradients_of_a_sparse_table_are_sparse():
    output = F.embedding(TOKENS, leaf(values(2, 6, 4)), sparse=True)

    (found,) = released(output, values(9, 2, 3, 4)).gradients()

    assert found.is_sparse
    assert torch.equal(found.to_dense()[3], torch.zeros(4))


@pytest.mark.parametrize("function", [torch.mm, lambda hidden, weight: F.conv1d(hidden[None], weight[..., None])])
def test_what_others_bring_back_only_once_cannot_wait(function):
    # They keep it under the name that checkpointing uses.
    with saved_tensors_hooks(lambda tensor: SimpleNamespace(handles=[tensor]), lambda kept: kept.handles.pop()):
        output = function(leaf(values(1, 4, 4)), leaf(values(2, 4, 4)))

    assert not read_node(output.grad_fn).can_wait


def test_no_product_is_what_has_a_weight_that_is_made_of_what_others_keep():
    layer = weight_norm(nn.Linear(5, 4))
    with save_on_cpu():
        output = layer(values(1, 3, 5))

    assert read_node(output.grad_fn) is None


def test_a_kernel_is_kept_and_not_counted_where_it_is_a_parameter():
    for weight, is_counted in (leaf(values(2, 6, 4, 3)), False), (leaf(values(2, 6, 4, 3)) * 2, True):
        output = checkpoint(F.conv1d, values(1, 2, 4, 9), weight, use_reentrant=False)

        product = released(output, torch.ones_like(output))

        assert (weight.shape in [each.shape for each in product.held_tensors]) == is_counted


def test_a_product_after_nothing_but_its_weights_is_an_end():
    weight = nn.Parameter(values(2, 5, 4))

    ends = [
        len(read_node((hidden @ weight).grad_fn).target_edges(captures_gradients=False))
        for hidden in (values(1, 3, 5), values(1, 3, 5).requires_grad_())
    ]

    assert ends == [1, 0]


@pytest.mark.parametrize(("changed", "shape"), [(None, ""), (0, r"\(3, 5\)"), (1, r"\(3, 4\)")])
def test_what_is_changed_in_place_before_the_weight_part_is_told(changed, shape):
    activations, weight, gradient = values(1, 3, 5), nn.Parameter(values(2, 5, 4)), values(3, 3, 4)
    product = released(activations @ weight, gradient)
    expected = activations.t() @ gradient
    if changed is None:
        assert torch.equal(product.gradients()[0], expected)
        return
    (activations, gradient)[changed][0] = 0.0
    with pytest.raises(PipelineError, match=shape + r".* were changed in place .* at version 1, expected 0"):
        product.gradients()
