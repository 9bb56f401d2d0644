"""A step starts empty and does not share what it collects with another step."""

import math

import torch

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.step import Step
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.output import LossName


def test_two_steps_collect_apart():
    microbatches = BatchRule(2).microbatches((torch.arange(4),), {}, None)
    slices, shares = [[microbatch] for microbatch in microbatches], LossShares([0.5, 0.5], [[1.0], [1.0]])
    first, second = (Step(slices, shares, None, keeps_outputs=False) for _ in range(2))

    first.losses[0, 0] = torch.tensor(1.0)
    first.outputs[0, 0] = torch.tensor(2.0)

    assert second.losses == {}
    assert second.outputs == {}
    assert [microbatch.size for (microbatch,) in second.slices] == [2, 2]
    assert second.num_slices == 1


def empty_step(**options):
    return Step([], LossShares([], []), None, keeps_outputs=False, **options)


def test_losses_of_one_name_and_place_are_added_up_without_their_graph():
    step, name = empty_step(), LossName("balance", True, torch.float32)

    for value in (1.0, 2.0):
        step.note(name, (1, 0), torch.tensor(value, requires_grad=True))

    assert step.named == {name: {(1, 0): torch.tensor(3.0, dtype=torch.float64)}}
    assert not step.named[name][1, 0].requires_grad


def test_a_backward_begins_at_the_loss_times_its_factor_and_the_scale():
    loss = torch.tensor(3.0)

    assert empty_step().root_of(loss, 0.5) == 1.5
    assert empty_step(scale=lambda loss: loss * 8.0).root_of(loss, 0.5) == 12.0


def test_what_weighs_nothing_begins_no_backward():
    assert empty_step().root_of(torch.tensor(math.nan), 0.0) is None
