"""An input behind which lies a graph that only one backward can run through is refused before the step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import StepRefused
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, assert_errors, error_of, float_layers, on_ranks, square_loss, values

ROWS = 8
SAVING = {
    "a product": lambda leaf: leaf * 2,
    "a view of a product": lambda leaf: (leaf * 2).view(ROWS, WIDTH),
    "a checkpoint": lambda leaf: checkpoint(torch.tanh, leaf, use_reentrant=False),
}
REPEATABLE = {
    "a leaf": lambda leaf: leaf,
    "a view": lambda leaf: leaf.view(ROWS, WIDTH),
    "a sum": lambda leaf: leaf + 1,
    "a detached product": lambda leaf: (leaf * 2).detach(),
}


class Shifted(nn.Module):
    """A layer with a keyword."""

    def forward(self, x, shift=None):
        return x if shift is None else x + shift


def make_leaf(seed=1):
    return values(seed, ROWS, WIDTH).requires_grad_()


def on_pipelines(make_batch, body, microbatches=4):
    """Return per rank what `body(pipeline, step, leaf)` returned, where `step` runs the batch made of the leaf."""

    def case(wires):
        leaf = make_leaf()
        args, kwargs = make_batch(leaf)
        with Pipeline([Shifted(), *float_layers()], "1f1b", microbatches, square_loss, transport=wires) as pipeline:
            return body(pipeline, lambda: pipeline.step(*args, target=values(2, ROWS, WIDTH), **kwargs), leaf)

    return on_ranks(2, case)


@pytest.mark.parametrize("kind", SAVING)
def test_an_input_that_was_computed_with_gradients_is_refused_by_name_on_every_rank(kind):
    batches = {
        "args[0]": lambda leaf: ((SAVING[kind](leaf),), {}),
        "kwargs['shift']": lambda leaf: ((values(3, ROWS, WIDTH),), {"shift": SAVING[kind](leaf)}),
    }

    for place, make_batch in batches.items():
        errors = on_pipelines(make_batch, lambda pipeline, step, leaf: error_of(step))
        told = f"{place} is no leaf but computed with gradients (grad_fn "
        assert_errors(errors, StepRefused, told, f"Pass {place}.detach(), or make the computation a layer")


@pytest.mark.parametrize("kind", REPEATABLE)
def test_an_input_whose_graph_runs_many_times_has_the_gradient_of_one_process(kind):
    leaf = make_leaf()
    loss = square_loss(nn.Sequential(*float_layers())(REPEATABLE[kind](leaf)), values(2, ROWS, WIDTH))
    loss.backward()

    found = on_pipelines(lambda leaf: ((REPEATABLE[kind](leaf),), {}), lambda pipeline, step, leaf: (step(), leaf.grad))

    gradient = found[0][1]  # that of the rank of the first layer, which alone runs backward through its input
    assert (gradient is None) == (leaf.grad is None)
    if gradient is not None:
        torch.testing.assert_close(gradient, leaf.grad)


def test_one_microbatch_and_an_evaluation_take_any_input():
    def evaluate(pipeline, step, leaf):
        return pipeline.evaluate(leaf * 2, target=values(2, ROWS, WIDTH)).loss

    def product(leaf):
        return (leaf * 2,), {}

    trained = on_pipelines(product, lambda pipeline, step, leaf: step().loss, microbatches=1)
    evaluated = on_pipelines(product, evaluate)

    torch.testing.assert_close(trained, evaluated)
