"""Rows that compute: forward, recomputation, backward, and the two parts of a split backward.

A row that computes on a received message is two calls, the wait and the computation, so that a recorded step can tell
them apart. Where rows get what they work on, and where they put what they make:

    the batch        of a first stage
    step.received    what a message brought, after the call that waits for it
    step.made        what a row made for its send, or for another stage of this rank
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.errors import PipelineError
from penstock.execute.compile.context import CompileContext
from penstock.execute.stages.recompute import RecomputedPasses
from penstock.execute.step import Bound, Step
from penstock.execute.transport.messages import Incoming
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE
from penstock.ir.operations import IS_RECEIVE, Op

Take = Callable[[Step], Any]
"""Gets what a row works on."""


def compile_forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a stage forward; what it saves waits for the backward, and its outputs for the next stage."""
    run, place, slot = context.passes_of(row).forward, context.place(row), context.slot(row)
    microbatch, index = place
    take, waits = _take_inputs(context, row)
    key, action, note_outputs = context.key(row), context.text(row), context.messenger.layouts.note_outputs
    is_last = context.program.placement.next_stage[key[0]] == NONE

    def forward(step: Step) -> None:
        outputs, step.saved[slot] = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        if not is_last:
            note_outputs(key, outputs, action)
            step.made[row] = VersionGuard.detached(outputs)

    yield from waits
    yield Bound(row, forward)


def compile_recompute(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a forward again; its activation takes the place of what the first run saved."""
    passes, place, slot = context.passes_of(row), context.place(row), context.slot(row)
    action = context.text(context.rows.source(row))
    if not isinstance(passes, RecomputedPasses):
        raise PipelineError(f"{action}: its forward keeps no inputs; run the program that was checked")

    def run_again(step: Step) -> None:
        step.saved[slot] = passes.recompute(step, place, step.saved[slot])

    yield Bound(row, run_again)


def compile_backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a whole backward, or the part of one that computes the gradients of inputs."""
    passes, slot = context.passes_of(row), context.slot(row)
    is_whole = context.program.op[row] == Op.BACKWARD
    run = passes.backward if is_whole else passes.backward_input
    take, waits = _take_gradients(context, row)
    is_first = context.program.placement.previous_stage[context.program.stage[row]] == NONE

    def backward(step: Step) -> None:
        gradients = run(step, step.saved[slot], take(step))
        if not is_first:
            step.made[row] = gradients
        if is_whole:
            del step.saved[slot]  # now: what forwards save is most of the memory of a step

    yield from waits
    yield Bound(row, backward)


def compile_backward_weight(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run the part of a backward that computes the gradients of weights."""
    run, slot = context.passes_of(row).backward_weight, context.slot(row)

    def backward_weight(step: Step) -> None:
        run(step.saved[slot])
        del step.saved[slot]

    yield Bound(row, backward_weight)


def _take_inputs(context: CompileContext, row: int) -> tuple[Take, Sequence[Bound]]:
    """Return what gets the inputs of a forward, as a tuple, and the waits before it."""
    source = context.rows.source(row)
    if source == NONE:
        microbatch, index = context.place(row)
        return lambda step: step.slices[microbatch][index].args, ()
    if IS_RECEIVE[context.program.op[source]]:
        take, wait = _take_received(context, row, context.messenger.receiver.take_tree)
        return lambda step: (take(step),), (wait,)
    action = context.text(source)
    return lambda step: (step.made.pop(source).checked(action),), ()


def _take_gradients(context: CompileContext, row: int) -> tuple[Take, Sequence[Bound]]:
    """Return what gets the gradients of a stage's outputs, and the waits before it."""
    source = context.rows.source(row)
    if source == NONE:
        return lambda step: (), ()  # a last stage begins at its loss
    if IS_RECEIVE[context.program.op[source]]:
        take, wait = _take_received(context, row, context.messenger.receiver.take_gradients)
        return take, (wait,)
    return lambda step: step.made.pop(source), ()


def _take_received(context: CompileContext, row: int, take: Callable[[Incoming], Any]) -> tuple[Take, Bound]:
    """Return what gets a received value, and the wait, which releases those sent ones that have arrived by then."""
    source = context.rows.source(row)
    slot, release = context.slot(source), context.messenger.sender.release
    peer, num_arrived = context.rows.arrived[source]

    def wait(step: Step) -> None:
        step.received[slot] = take(step.received[slot])
        release(peer, num_arrived)

    # The register is emptied as it is read: else the input would live as long as the step, not as its stage needs it.
    return lambda step: step.received.pop(slot), Bound(row, wait, source)
