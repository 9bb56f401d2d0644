"""The hook behind kernels, which torch does not document: a new torch that changes it fails here."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from penstock.execute.undocumented_kernels import SeenKernels


def sizes_seen(run):
    """Return how many numbers each result of a kernel has, in order."""
    seen = []
    with SeenKernels(lambda arguments, results: seen.append(results.numel() if torch.is_tensor(results) else None)):
        run()
    return seen


def test_kernels_of_a_forward_and_of_a_backward_are_seen():
    weight = torch.ones(3, 5, requires_grad=True)
    product = []

    assert 10 in sizes_seen(lambda: product.append(torch.ones(2, 3) @ weight))
    assert 15 in sizes_seen(product[0].sum().backward)
    assert sizes_seen(lambda: None) == []


def test_a_function_sees_what_a_kernel_took():
    seen = []
    with SeenKernels(lambda arguments, results: seen.append(arguments)):
        torch.add(left := torch.ones(2), other=(right := torch.ones(2)), alpha=2)

    (args, kwargs) = seen[-1]
    assert args[0] is left
    assert args[1] is right
    assert kwargs == {"alpha": 2}


def test_recomputation_under_it_is_seen_too():
    hidden = torch.ones(7, requires_grad=True)
    output = checkpoint(lambda values: (values * 2).exp(), hidden, use_reentrant=False)

    seen = sizes_seen(output.sum().backward)

    assert seen.count(7) >= 3  # the product and its exponential again, and gradients


def test_compiled_code_stays_compiled_under_it_and_is_not_seen():
    backends = []

    def backend(graph, inputs):
        backends.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def double(values):
        return values * 2

    with SeenKernels(lambda arguments, results: None):
        assert double(torch.ones(3)).tolist() == [2.0] * 3

    assert len(backends) == 1


def test_operations_of_higher_order_run_under_it():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    queries = torch.ones(1, 1, 16, 8)

    with SeenKernels(lambda arguments, results: None):
        output = flex.flex_attention(queries, queries, queries)

    assert torch.allclose(output, torch.ones(1, 1, 16, 8))


def test_a_storage_is_an_object_as_long_as_its_memory_lives():
    """A finalizer of the Python object runs when the last tensor is gone, not when the object is."""
    from weakref import finalize

    gone = []
    tensor = torch.ones(4)
    finalize(tensor.untyped_storage(), gone.append, True)
    view = tensor[1:]
    del tensor

    assert gone == []
    del view
    assert gone == [True]
