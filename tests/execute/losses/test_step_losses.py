"""The losses of a step are noted apart from those of other steps, and weighted and scaled where backwards begin."""

import math

import torch

from penstock.execute.losses.output import LossName
from penstock.execute.losses.step_losses import StepLosses

NAME = LossName("balance", True, torch.float32)


def empty(**options):
    return StepLosses(1, 1, **options)


def test_two_steps_collect_apart():
    first, second = empty(), empty()

    first.computed[0, 0] = torch.tensor(1.0)

    assert second.computed == {}


def test_losses_of_one_name_and_place_are_added_up_without_their_graph():
    losses = empty()

    for value in (1.0, 2.0):
        losses.note(NAME, (1, 0), torch.tensor(value, requires_grad=True))

    assert losses.named == {NAME: {(1, 0): torch.tensor(3.0, dtype=torch.float64)}}
    assert not losses.named[NAME][1, 0].requires_grad


def test_a_backward_begins_at_the_loss_times_its_factor_and_the_scale():
    loss = torch.tensor(3.0)

    assert empty().root_of(loss, 0.5) == 1.5
    assert empty(scale=lambda loss: loss * 8.0).root_of(loss, 0.5) == 12.0


def test_what_weighs_nothing_begins_no_backward():
    assert empty().root_of(torch.tensor(math.nan), 0.0) is None


def test_the_same_rules_without_what_was_noted():
    losses = empty(scale=lambda loss: loss * 8.0)
    losses.computed[0, 0] = torch.tensor(1.0)

    again = losses.forgetting()
    again.note(NAME, (0, 0), torch.tensor(1.0))

    assert again.computed == losses.named == {}
    assert again.root_of(torch.tensor(3.0), 0.5) == 12.0
