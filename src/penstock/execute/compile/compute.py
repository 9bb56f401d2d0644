"""Rows that compute: forward, recomputation, backward, and the two parts of a split backward.

A row that computes on a received message is two calls, the wait and the computation, so that a recorded step can tell
them apart. Where rows get what they work on, and where they put what they make:

    the batch        of a first stage
    step.inputs      what a message brought, after the call that waits for it
    step.local       what another stage of this rank made
    step.outgoing    what waits for its send
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.errors import PipelineError
from penstock.execute.compile.context import CompileContext, Put, Take
from penstock.execute.stages.recompute import RecomputedPasses
from penstock.execute.step import Bound, Step
from penstock.execute.transport.messages import Incoming
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE
from penstock.ir.operations import IS_RECEIVE


def compile_forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a stage forward; what it saves waits for the backward, and its outputs for the next stage."""
    run, place, slot = context.passes_of(row).forward, context.place(row), context.slot(row)
    microbatch, index = place
    take, waits = _take_inputs(context, row)
    put = _put_outputs(context, row)

    def forward(step: Step) -> None:
        outputs, step.saved[slot] = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        put(step, outputs)

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
    """Run a whole backward."""
    run, slot = context.passes_of(row).backward, context.slot(row)
    take, waits = _take_gradients(context, row)
    put = _put_gradients(context, row)

    def backward(step: Step) -> None:
        put(step, run(step, step.saved[slot], take(step)))
        step.saved[slot] = None  # now: what forwards save is most of the memory of a step

    yield from waits
    yield Bound(row, backward)


def compile_backward_input(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run the part of a backward that computes the gradients of inputs."""
    run, slot = context.passes_of(row).backward_input, context.slot(row)
    take, waits = _take_gradients(context, row)
    put = _put_gradients(context, row)

    def backward_input(step: Step) -> None:
        put(step, run(step, step.saved[slot], take(step)))

    yield from waits
    yield Bound(row, backward_input)


def compile_backward_weight(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run the part of a backward that computes the gradients of weights."""
    run, slot = context.passes_of(row).backward_weight, context.slot(row)

    def backward_weight(step: Step) -> None:
        run(step.saved[slot])
        step.saved[slot] = None

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
    return lambda step: (step.local.pop(source).checked(action),), ()


def _take_gradients(context: CompileContext, row: int) -> tuple[Take, Sequence[Bound]]:
    """Return what gets the gradients of a stage's outputs, and the waits before it."""
    source = context.rows.source(row)
    if source == NONE:
        return lambda step: (), ()  # a last stage begins at its loss
    if IS_RECEIVE[context.program.op[source]]:
        take, wait = _take_received(context, row, context.messenger.receiver.take_gradients)
        return take, (wait,)
    return lambda step: step.local.pop(source), ()


def _put_outputs(context: CompileContext, row: int) -> Put:
    """Return what puts a forward's outputs where the next stage, or its message, gets them."""
    if context.program.placement.next_stage[context.program.stage[row]] == NONE:
        return _drop
    key, action, note_outputs = context.key(row), context.text(row), context.messenger.layouts.note_outputs
    put = _put(context, row)

    def put_detached(step: Step, outputs: Any) -> None:
        note_outputs(key, outputs, action)
        put(step, VersionGuard.detached(outputs))

    return put_detached


def _put_gradients(context: CompileContext, row: int) -> Put:
    """Return what puts the gradients of a stage's inputs where the stage before, or its message, gets them."""
    if context.program.placement.previous_stage[context.program.stage[row]] == NONE:
        return _drop
    return _put(context, row)


def _put(context: CompileContext, row: int) -> Put:
    send = context.rows.sends.get(row)
    if send is None:

        def put_locally(step: Step, value: Any) -> None:
            step.local[row] = value

        return put_locally
    slot = context.slot(send)

    def put_outgoing(step: Step, value: Any) -> None:
        step.outgoing[slot] = value

    return put_outgoing


def _drop(step: Step, value: Any) -> None:
    """Nobody gets it."""


def _take_received(context: CompileContext, row: int, take: Callable[[Incoming], Any]) -> tuple[Take, Bound]:
    """Return what gets a received value, and the wait, which releases those sent ones that have arrived by then."""
    source = context.rows.source(row)
    slot, release = context.slot(source), context.messenger.sender.release
    peer, num_arrived = context.rows.arrived[source]

    def wait(step: Step) -> None:
        step.inputs[slot] = take(step.received[slot])
        step.received[slot] = None
        release(peer, num_arrived)

    # The register is emptied as it is read: else the input would live as long as the step, not as its stage needs it.
    def take_received(step: Step) -> Any:
        value, step.inputs[slot] = step.inputs[slot], None
        return value

    return take_received, Bound(row, wait, source)
