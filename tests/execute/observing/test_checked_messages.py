"""Every message says what it is, and one that is not what its receiver expects is refused with both descriptions."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.observing.checked_messages import CheckedMessages
from penstock.execute.transport.protocol import Tag, Ticket
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.execute.test_run import OUT_OF_ORDER
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


def run_twice(num_ranks, task, schedule, **options):
    """Return what all ranks saw of the second step, in which receives would be posted ahead."""
    options |= {"debug": "messages"}
    return on_pipelines(num_ranks, task, partial(second_step, task=task), schedule, None, **options)


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


def test_messages_out_of_order_those_of_tied_gradients_and_those_of_copies_pass():
    task, tokens = float_task(12, torch.float64), token_task(8, torch.float64)

    outcomes = run_twice(2, task, OUT_OF_ORDER)
    run_twice(2, tokens, build("1f1b", ranks=2, microbatches=4), tied=[("0.weight", "4.weight")])
    run_twice(2, tokens, build("dualpipe", ranks=2, microbatches=4))

    assert difference(outcomes, task.reference(3), tolerance=1e-12) == []


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_messages_that_are_taken_in_a_barrier_pass_and_so_do_those_of_the_barrier(name):
    task = replace(float_task(8), make_layers=partial(float_layers, num_layers=4))
    program = lower(build(name, ranks=2, microbatches=4), barriers=True, loads=True)

    assert difference(run_twice(2, task, program), task.reference(4)) == []


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


@pytest.mark.feature("C13")
@pytest.mark.parametrize(
    ("serial", "size", "expected"),
    [(0, 4, "outside all instructions (step 0, part 0, 4 values)"), (1, 3, "(step 1, part 0, 3 values) next")],
    ids=["size", "step"],
)
def test_a_message_of_another_size_or_step_is_refused_before_it_is_taken(serial, size, expected):
    def case(wires):
        checked = CheckedMessages(wires, CPU)
        if wires.rank == 0:
            checked.wait(checked.post_send(1, values(0, 3)))
        else:
            checked.begin(SimpleNamespace(serial=serial))
            checked.wait(checked.post_receive(0, torch.zeros(size)))

    text = str(error_of(on_ranks, 2, case))

    assert expected in text
    assert "(step 0, part 0, 3 values) came" in text


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
