"""Programs with a BARRIER after every step of an untimed walk: the same bits, and no rank runs ahead of another."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.acceptance.steps.test_ways_of_messages import FAMILIES, WAYS
from tests.support.local_pipelines import WIDTH, block, on_ranks, settle
from tests.support.ranks import run_ranks


def trained(transport, program, messages="posted", **options):
    """Take three steps and evaluate; return the losses, and the gradients of this rank by name."""
    layers = [block(index, torch.float64) for index in range(8)]
    layers[0], layers[7] = (settle(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seed) for seed in (8, 9))
    options |= {"transport": transport, "messages": messages}
    pipeline = Pipeline(layers, program, 8, nn.functional.mse_loss, **options)
    losses = []
    for number in range(3):
        inputs, target = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        losses.append(pipeline.step(inputs, target=target).loss.item())
    losses.append(pipeline.evaluate(inputs, target=target).loss.item())
    gradients = {name: parameter.grad.tolist() for name, parameter in pipeline.named_parameters()}
    pipeline.close()
    return losses, gradients


@pytest.mark.feature("B15")
@pytest.mark.parametrize("family", FAMILIES)
def test_barriers_change_no_bit_however_messages_travel(family):
    schedule = build(family, ranks=4, microbatches=8, **FAMILIES[family])
    plain = on_ranks(4, trained, lower(schedule))

    for messages in WAYS:
        assert on_ranks(4, trained, lower(schedule, barriers=True), messages) == plain


def test_tied_layers_and_an_optimizer_step_change_nothing_of_it():
    schedule = build("zb-h1", ranks=4, microbatches=8)
    options = {"tied_groups": [(0, 3)], "optimizer_step": True}
    plain, with_barriers = lower(schedule, **options), lower(schedule, **options, barriers=True)
    of_pipeline = {"tied": [("0.weight", "7.weight")], "optimizer_step": lambda: None}

    assert on_ranks(4, lambda wires: trained(wires, with_barriers, **of_pipeline)) == on_ranks(
        4, lambda wires: trained(wires, plain, **of_pipeline)
    )


def trained_in_process(rank, program):
    return trained(None, program)


@pytest.mark.slow
def test_processes_give_the_bits_of_threads():
    schedule = build("1f1b", ranks=2, microbatches=8)

    assert run_ranks(2, trained_in_process, lower(schedule, barriers=True)) == on_ranks(2, trained, lower(schedule))


class Noted(nn.Linear):
    """A layer that notes when its forwards run, the first stage later than it could."""

    def __init__(self, stage, events):
        super().__init__(4, 4)
        self.stage, self.events, self.count = stage, events, 0

    def forward(self, inputs):
        time.sleep(0.004 * (self.stage == 1))
        self.events.append((self.stage, self.count % 4))
        self.count += 1
        return super().forward(inputs)


def test_no_rank_runs_ahead_of_a_barrier():
    schedule = build("gpipe", ranks=2, microbatches=4)
    events = []

    def step(transport, program):
        layers = [Noted(0, events), Noted(1, events)]
        pipeline = Pipeline(layers, program, 4, nn.functional.mse_loss, transport=transport)
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
        events.clear()
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
        pipeline.close()

    on_ranks(2, step, lower(schedule, barriers=True))

    # In a walk, stage s runs the forward of microbatch m in step s + m.
    slots = [stage + microbatch for stage, microbatch in events]
    assert all(earlier <= later for earlier, later in pairwise(slots))
