"""A backward that runs within a backward is run in another way, if gradients are all that comes of it."""

import pytest
import torch

from penstock.execute.split.deferred_weights import NestedBackwards
from tests.support.local_pipelines import WIDTH, values


def weight():
    return values(1, WIDTH).requires_grad_()


def seen_of(call):
    """The backwards that were run in another way, as the gradients with which they began."""
    seen = []
    with NestedBackwards(lambda edges, gradients: seen.append([len(edges), *gradients])):
        call()
    return seen


@pytest.mark.parametrize("as_list", [True, False])
def test_a_backward_to_all_leaves_is_run_in_another_way(as_list):
    leaf, gradient = weight(), values(2, WIDTH)
    root = leaf * 2

    with torch.no_grad():
        (seen,) = seen_of(
            lambda: torch.autograd.backward([root] if as_list else root, [gradient] if as_list else gradient)
        )

    assert seen[0] == 1
    assert seen[1] is gradient
    assert leaf.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "run",
    [
        lambda root, leaf: torch.autograd.backward(root, torch.ones(WIDTH), inputs=[leaf]),
        lambda root, leaf: torch.autograd.backward(root, torch.ones(WIDTH), retain_graph=True),
        lambda root, leaf: torch.autograd.backward(root, torch.ones(WIDTH), create_graph=True),
        lambda root, leaf: torch.autograd.backward(root.sum_of_all),
        torch.enable_grad()(lambda root, leaf: torch.autograd.backward(root, torch.ones(WIDTH))),
    ],
    ids=[
        "to some leaves",
        "of a graph that stays",
        "that grows a graph",
        "from ones",
        "of a layer that uses it at once",
    ],
)
def test_one_that_asks_for_something_else_is_left_alone(run):
    leaf = weight()
    root = leaf * 2
    root.sum_of_all = root.sum()

    with torch.no_grad():
        assert seen_of(lambda: run(root, leaf)) == []
    assert leaf.grad.tolist() == [2.0] * WIDTH
