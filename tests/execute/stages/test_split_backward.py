"""The input and the weight gradients of a stage's backward together are the whole; what cannot wait is said once."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import MAX_SHOWN, PenstockWarning
from penstock.execute.stages.stage import Stage
from tests.support.local_pipelines import WIDTH, block, settle, values
from tests.support.one_stage import OneStage
from tests.support.using import Product, Using


def run(parts, layer=None, *, is_split=True):
    return run_stage(OneStage(Stage(0, {"0": block(0) if layer is None else layer}), is_split=is_split), parts)


def run_stage(stage, parts):
    saved = stage.saved(values(1, 2, 3, WIDTH).requires_grad_())
    gradients = parts(stage, saved, values(2, 2, 3, WIDTH))
    return [*gradients, *(parameter.grad for _, parameter in stage.stage.named_parameters())]


def in_two_parts(stage, saved, gradient):
    found = stage.backward_input(saved, gradient)
    stage.backward_weight(saved)
    return found


class Custom(nn.Module):
    """Calls the user's own function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, hidden):
        return Product.apply(hidden, self.weight)


def custom():
    return settle(nn.Sequential(nn.Linear(WIDTH, WIDTH), Custom()), 0)


def again(layer, use_reentrant):
    """Return what runs its layer once more in the backward; the older way of torch begins a backward of its own."""
    return Using(lambda self, x: checkpoint(self.layer, x, use_reentrant=use_reentrant), layer=layer)


@pytest.mark.parametrize("is_split", [True, False])
def test_input_part_and_weight_part_together_are_the_whole_backward(is_split):
    assert all(map(torch.equal, run(in_two_parts, is_split=is_split), run(OneStage.backward, is_split=False)))


@pytest.mark.feature("X18")
def test_the_gradients_of_matrices_come_with_the_weight_part():
    *_, weight, bias = run(OneStage.backward_input)

    assert weight is None
    assert bias is not None


def test_what_is_no_longer_needed_is_let_go_after_each_part():
    stage = OneStage(Stage(0, {"0": block(0)}), is_split=True)
    saved = stage.saved(values(1, 3, WIDTH).requires_grad_())

    stage.backward_input(saved, values(2, 3, WIDTH))
    assert (saved.inputs, saved.edges, saved.loss_gradients) == ([], [], [])

    stage.backward_weight(saved)
    assert saved.deferred is None


@pytest.mark.feature("X18")
def test_weights_that_cannot_wait_have_their_gradients_and_are_named_once():
    stage = OneStage(Stage(3, {"0": custom()}), is_split=True)

    found = run_stage(stage, in_two_parts)  # shows which weights are small
    assert all(map(torch.equal, found[1:], run(OneStage.backward, custom(), is_split=False)[1:]))
    stage.begin()
    with pytest.warns(PenstockWarning, match=r"stage 3: 50% of its weights .*: 0\.1\.weight") as told:
        run_stage(stage, in_two_parts)
    assert "0.0.weight" not in str(told[0].message)
    stage.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_stage(stage, in_two_parts)


@pytest.mark.parametrize(("num_custom", "more"), [(MAX_SHOWN, ""), (MAX_SHOWN + 2, " and 2 more")])
def test_of_many_weights_that_cannot_wait_some_are_named_and_the_others_counted(num_custom, more):
    layer = settle(nn.Sequential(*(Custom() for _ in range(num_custom))), 0)

    with pytest.warns(PenstockWarning) as told:
        run_stage(OneStage(Stage(0, {"0": layer}), is_split=True), in_two_parts)

    assert f": {', '.join(f'0.{index}.weight' for index in range(MAX_SHOWN))}{more}. They" in str(told[0].message)


@pytest.mark.parametrize(
    "make",
    [
        lambda: settle(nn.Sequential(block(0), Custom(), nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH)), 0),
        lambda: settle(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 0),
        lambda: again(block(0), True),
        lambda: nn.Sequential(again(block(0), False), block(1)),
    ],
    ids=[
        "little that cannot wait",
        "torch's own attention",
        "what is known from the next step on",
        "what is small then",
    ],
)
def test_nothing_is_said_of(make):
    stage = OneStage(Stage(0, {"0": make()}), is_split=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            stage.begin()
            run_stage(stage, in_two_parts)
