"""The graph of a backward is cut in two halves, which together do what it does, and nothing twice."""

from collections import Counter

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.execute.split.graph_cut import BackwardGraph
from penstock.execute.undocumented_compiler import is_view

ROWS, WIDTH = 3, 4
INPUT, WEIGHT, BIAS = range(3)


def of_linear(inputs, weight, gradient):
    """The backward of a linear layer: of the input, the weight, the bias."""
    return gradient @ weight, (gradient.tanh().t() @ inputs).t().t(), gradient.sum(0)


def of_two(inputs, weight, gradient):
    """The input gradient and the weight gradient go out from one product."""
    shared = gradient @ weight
    return shared.exp(), shared.t() @ inputs, None


def of_view(inputs, weight, gradient):
    """Both products take the same view."""
    turned = gradient.t()
    return (weight.t() @ turned).t(), turned @ inputs, None


def of_items(inputs, weight, gradient):
    """An operation with two results, one for each half."""
    variance, mean = torch.var_mean(gradient, 1, keepdim=True)
    return variance * gradient @ weight, (mean * gradient).t() @ inputs, None


def of_scale(inputs, weight, gradient):
    return gradient * weight[0], (gradient * inputs).sum(0).expand(WIDTH, WIDTH), gradient.sum(0)


def values(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SQUARE = values((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))


def traced(function, inputs=None):
    return make_fx(function, tracing_mode="fake")(*(inputs or SQUARE))


def run_halves(cut, inputs):
    """Return what both halves return, by the place of each output."""
    first, second = cut.input_half, cut.weight_half
    results = first.module(*[inputs[place] for place in first.inputs])
    extras = results[len(first.outputs) :]
    late = second.module(*[inputs[place] for place in second.inputs], *extras)
    return dict(zip(first.outputs, results, strict=False)) | dict(zip(second.outputs, late, strict=True))


def operations(*modules):
    nodes = [node for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target) for node in nodes if not is_view(node))


def cut_of(function, inputs=None):
    graph = BackwardGraph(traced(function, inputs))
    return graph, graph.cut(graph.waiting_outputs([WEIGHT]))


def test_both_halves_return_the_bits_of_the_whole_and_run_no_operation_twice_but_views():
    for function in (of_linear, of_two, of_view, of_items):
        _, cut = cut_of(function)
        assert operations(cut.input_half.module, cut.weight_half.module) == operations(traced(function))

        found = run_halves(cut, SQUARE)

        wanted = [each for each in enumerate(function(*SQUARE)) if each[1] is not None]
        assert sorted(found) == [place for place, _ in wanted]
        assert all(torch.equal(found[place], each) for place, each in wanted)


def test_work_for_a_weight_alone_waits_for_w_and_takes_what_both_need_but_no_view_of_it():
    (_, alone), (_, shared), (_, in_both) = map(cut_of, (of_linear, of_two, of_view))

    assert operations(alone.input_half.module) == {"aten.mm.default": 1, "aten.sum.dim_IntList": 1}
    assert operations(alone.weight_half.module) == {"aten.tanh.default": 1, "aten.mm.default": 1}
    assert operations(shared.weight_half.module) == {"aten.mm.default": 1}
    assert alone.num_multiplications == shared.num_multiplications == ROWS * WIDTH * WIDTH
    for cut in (alone, in_both):
        assert (list(cut.weight_half.inputs), cut.weight_half.extras) == ([0, 2], [])
    assert [tuple(each.shape) for each in shared.weight_half.extras] == [(ROWS, WIDTH)]  # not transposed
    assert list(shared.weight_half.inputs) == [0]


def test_a_gradient_without_a_product_does_not_wait():
    graph = BackwardGraph(traced(of_scale))

    assert graph.waiting_outputs([WEIGHT, BIAS]) == frozenset()
    assert BackwardGraph(traced(of_linear)).waiting_outputs([WEIGHT, BIAS]) == {WEIGHT}


def test_a_graph_that_changes_tensors_or_draws_is_trouble():
    assert BackwardGraph(traced(of_linear)).trouble() == ""
    for function in (
        lambda inputs, weight, gradient: (gradient @ weight, inputs.add_(gradient)),
        lambda inputs, weight, gradient: (gradient @ weight, torch.bernoulli(inputs.sigmoid())),
    ):
        module = traced(function)
        assert isinstance(module, fx.GraphModule)
        assert "changes a tensor in place, or draws random numbers" in BackwardGraph(module).trouble()
