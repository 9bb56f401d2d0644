"""Every message says what it is, and one that is not what its receiver expects is refused with both descriptions."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.observing.checked_messages import CheckedMessages
from penstock.execute.transport.protocol import Tag, Ticket
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.schedules import build
from tests.execute.test_run import drawn
from tests.support.local_pipelines import (
    MAX_WAIT_S,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    on_ranks,
    pipeline_of,
    second_step,
    step_task,
    token_task,
    values,
    zero,
)

CPU = torch.device("cpu")
OUT_OF_ORDER = drawn(Placement.line(2), "0F2 0F0 0F1 0B1 0B0 0B2", "1F2 1F0 1F1 1B1 1B0 1B2")


def run_twice(num_ranks, task, schedule, **options):
    """Return what all ranks saw of the second step, in which receives would be posted ahead."""
    options |= {"debug": "messages"}
    return on_pipelines(num_ranks, task, lambda pipeline: second_step(pipeline, task), schedule, None, **options)


@pytest.mark.parametrize("num_frozen", range(4))
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("1f1b", 3),
        ("zbv", 2),
        *(pytest.param(f"interleaved-{name}", 2, marks=pytest.mark.slow) for name in ("1f1b", "zb")),
    ],
)
def test_checked_messages_change_no_bit_also_those_without_any_tensor(name, num_ranks, num_frozen):
    """No gradient goes back to first layers that are not trained; another message may come first there."""

    def make_layers():
        layers = float_layers(num_layers=4)
        for layer in layers[:num_frozen]:
            layer.requires_grad_(False)
        return layers

    task = replace(float_task(8), make_layers=make_layers)

    outcomes = run_twice(num_ranks, task, build(name, ranks=num_ranks, microbatches=4))

    assert difference(outcomes, task.reference(4)) == []


def test_messages_out_of_the_order_of_microbatches_pass():
    task = float_task(12, torch.float64)

    outcomes = run_twice(2, task, OUT_OF_ORDER)

    assert difference(outcomes, task.reference(3), tolerance=1e-12) == []


def test_tied_gradients_and_the_copies_of_two_routes_pass():
    task = token_task(8, torch.float64)

    run_twice(2, task, build("1f1b", ranks=2, microbatches=4), tied=[("0.weight", "4.weight")])
    run_twice(2, task, build("dualpipe", ranks=2, microbatches=4))


class Swapping:
    """Wires that change the places of two messages: one waits until the next has gone."""

    def __init__(self, wires, place):
        self._wires = wires
        self._place = place
        self.num_sent = 0
        self._kept = []

    def __getattr__(self, name):
        return getattr(self._wires, name)

    def post_send(self, peer, tensor, tag=Tag.DATA):
        if tag is not Tag.DATA:
            return self._wires.post_send(peer, tensor, tag)
        self.num_sent += 1
        if self.num_sent in (self._place, self._place + 1):  # a header and its values
            self._kept.append((peer, tensor))
            return Ticket(peer, True, -1, is_over=True)
        ticket = self._wires.post_send(peer, tensor)
        if self.num_sent == self._place + 3:
            for kept in self._kept:
                self._wires.post_send(*kept)
        return ticket


@pytest.mark.feature("C13")
def test_a_swapped_order_is_told_with_both_actions_and_their_indices():
    task = float_task(8)

    def case(wires):
        pipeline = pipeline_of(wires, task, "gpipe", debug="messages")
        step_task(pipeline, task)
        if wires.rank == 0:
            checked = pipeline._runner._observers.messages
            checked._transport = Swapping(checked._transport, 3)
        step_task(pipeline, task)

    error = error_of(on_ranks, 2, case)

    assert isinstance(error, PipelineError)
    assert (
        "expected 0SEND_F1 (instruction 3, step 1, part 0, 12 values) next from rank 0, but "
        "0SEND_F2 (instruction 5, step 1, part 0, 12 values) came" in str(error)
    )
    assert "rank 1, 1F1: PipelineError: rank 1: expected" in str(error)


def between(first, second):
    """Return what happens on two ranks whose wires are checked."""

    def case(wires):
        return (first, second)[wires.rank](CheckedMessages(wires, CPU))

    return on_ranks(2, case)


def send(wires, *tensors):
    for ticket in [wires.post_send(1, tensor) for tensor in tensors]:
        wires.wait(ticket)


def receive(wires, *tensors):
    for ticket in reversed([wires.post_receive(0, tensor) for tensor in tensors]):
        wires.wait(ticket)


@pytest.mark.feature("C13")
def test_a_message_of_another_size_is_refused_before_it_is_taken():
    error = error_of(between, lambda wires: send(wires, values(0, 3)), lambda wires: receive(wires, torch.zeros(4)))

    assert "expected a message outside all instructions (step 0, part 0, 4 values)" in str(error)
    assert "(step 0, part 0, 3 values) came" in str(error)


@pytest.mark.feature("C13")
def test_a_message_of_another_step_is_refused():
    def second(wires):
        wires.begin(SimpleNamespace(serial=1))
        receive(wires, torch.zeros(3))

    error = error_of(between, lambda wires: send(wires, values(0, 3)), second)

    assert "(step 1, part 0, 3 values) next" in str(error)
    assert "(step 0, part 0, 3 values) came" in str(error)


class FailsOnce(nn.Module):
    """Raises an error in its third forward."""

    num_forwards = 0

    def forward(self, x):
        self.num_forwards += 1
        if self.num_forwards == 3:
            raise ValueError("not now")
        return x


@pytest.mark.parametrize("runs_alone", [False, True])
def test_a_step_after_a_failed_one_runs_with_checked_messages(runs_alone):
    """Also if one rank has tried another step meanwhile, without the others."""
    task, has_run = float_task(8), threading.Event()

    def case(wires):
        layers = [*task.make_layers(), FailsOnce()]
        pipeline = Pipeline(layers, "1f1b", 4, task.loss, transport=wires, debug="messages")
        error = error_of(step_task, pipeline, task)
        zero(pipeline)
        if runs_alone and wires.rank == 0:
            deadline_s, wires.deadline_s = wires.deadline_s, 0.2
            assert "could not start afresh" in str(error_of(step_task, pipeline, task))
            wires.deadline_s = deadline_s
        if runs_alone:
            has_run.set() if wires.rank == 0 else has_run.wait(MAX_WAIT_S)
        outcome = step_task(pipeline, task)
        pipeline.close()
        return error, outcome

    results = on_ranks(2, case)

    assert all("not now" in str(error) for error, _ in results)
    assert difference([outcome for _, outcome in results], task.reference(4)) == []
