"""The loss of a last stage's outputs is noted in the losses, and weighted and scaled where the backward begins."""

import pytest
import torch

from penstock import LossOutput
from penstock.errors import PipelineError
from penstock.execute.losses.delivery import deliver_loss
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.output import LossName
from penstock.execute.losses.step_losses import StepLosses

PLACE = (1, 0)


def losses_of(loss, weight=0.25, **options):
    shares = LossShares([1 - weight, weight], [[1.0], [1.0]], options.pop("counts", None))
    return StepLosses(2, 1, loss, shares, **options)


def deliver(losses, output, target=None, *, is_training=True):
    return deliver_loss(losses, PLACE, output, target, is_training=is_training)


def test_a_backward_begins_at_the_weighted_loss_and_the_loss_is_noted_unweighted():
    output = torch.tensor(3.0, requires_grad=True)
    losses = losses_of(lambda output, target: output * target)

    root = deliver(losses, output, 2.0)
    root.backward()

    assert root.item() == 1.5
    assert float(output.grad) == 0.5
    assert float(losses.computed[PLACE]) == 6.0
    assert not losses.computed[PLACE].requires_grad


def test_a_scale_changes_the_beginning_alone():
    output = torch.tensor(3.0, requires_grad=True)
    losses = losses_of(lambda output, target: {"a": output}, scale=lambda loss: loss * 8.0)

    root = deliver(losses, output)

    assert root.item() == 6.0
    assert float(losses.computed[PLACE]) == float(losses.named[LossName("a", False, torch.float32)][PLACE]) == 3.0


@pytest.mark.parametrize("scaled", [lambda loss: loss.detach(), lambda loss: loss.item(), lambda loss: loss.expand(2)])
def test_a_scale_that_no_backward_can_begin_at_is_refused(scaled):
    losses = losses_of(lambda output, target: output, scale=scaled)

    with pytest.raises(PipelineError, match=r"scale_loss returned .*; return the loss times a number"):
        deliver(losses, torch.tensor(3.0, requires_grad=True))


def test_in_evaluation_nothing_begins_and_nothing_is_scaled():
    calls = []
    losses = losses_of(lambda output, target: output, scale=lambda loss: calls.append(loss))

    assert deliver(losses, torch.tensor(3.0), is_training=False) is None
    assert float(losses.computed[PLACE]) == 3.0
    assert calls == []


def test_a_loss_of_no_weight_begins_nothing():
    losses = losses_of(lambda output, target: output * float("nan"), weight=0.0)

    assert deliver(losses, torch.tensor(3.0, requires_grad=True)) is None
    assert losses.computed[PLACE].isnan()


def test_a_loss_that_lets_go_of_the_output_is_refused():
    losses = losses_of(lambda output, target: output.detach())

    with pytest.raises(PipelineError, match="microbatch 1: the loss does not depend on the output any more"):
        deliver(losses, torch.tensor(3.0, requires_grad=True))


def test_without_a_loss_function_there_is_none():
    losses = losses_of(None)

    assert deliver(losses, torch.tensor(3.0, requires_grad=True)) is None
    assert losses.computed == {}


def test_a_function_that_asks_is_told_its_factor():
    losses = losses_of(lambda output, target, *, weight: output + weight, takes_weight=True)

    deliver(losses, torch.tensor(3.0, requires_grad=True))

    assert float(losses.computed[PLACE]) == 3.25


def test_what_is_named_and_reported_is_noted_and_the_count_is_compared():
    losses = losses_of(
        lambda output, target: LossOutput({"a": output, "b": output}, 3, reported="x"), counts=[[1.0], [3.0]]
    )

    deliver(losses, torch.tensor(3.0, requires_grad=True))

    assert float(losses.computed[PLACE]) == 2.0
    assert {name.name: float(losses[PLACE]) for name, losses in losses.named.items()} == {"a": 1.0, "b": 1.0}
    assert losses.reported == {PLACE: "x"}
