"""Where rows that compute get their inputs and gradients, and where they put what they make.

the batch        of a first stage
step.inputs      what a message brought, after a call that waits for it
step.local       what another stage of this rank made
step.outgoing    what waits for its send
"""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.execute.calls import Bound
from penstock.execute.compile.context import CompileContext, Put, Take
from penstock.execute.step import Step
from penstock.execute.transport.messages import Incoming
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE
from penstock.ir.operations import IS_RECEIVE


def take_inputs(context: CompileContext, row: int) -> tuple[Take, Sequence[Bound]]:
    """Return what gets the inputs of a forward, as a tuple, and the waits before it."""
    source = context.rows.source(row)
    if source == NONE:
        microbatch, index = context.place(row)
        return lambda step: step.slices[microbatch][index].args, ()
    if IS_RECEIVE[context.program.op[source]]:
        slot = context.slot(source)

        def take_received(step: Step) -> tuple[Any, ...]:
            value, step.inputs[slot] = step.inputs[slot], None
            return (value,)

        return take_received, (_wait(context, row, source, context.messenger.take_tree),)
    action = context.text(source)
    return lambda step: (step.local.pop(source).checked(action),), ()


def take_gradients(context: CompileContext, row: int) -> tuple[Take, Sequence[Bound]]:
    """Return what gets the gradients of a stage's outputs, and the waits before it."""
    source = context.rows.source(row)
    if source == NONE:
        return lambda step: (), ()  # a last stage begins at its loss
    if IS_RECEIVE[context.program.op[source]]:
        slot = context.slot(source)

        def take_received(step: Step) -> Any:
            value, step.inputs[slot] = step.inputs[slot], None
            return value

        return take_received, (_wait(context, row, source, context.messenger.take_gradients),)
    return lambda step: step.local.pop(source), ()


def put_outputs(context: CompileContext, row: int) -> Put:
    """Return what puts a forward's outputs where the next stage, or its message, gets them."""
    if context.program.placement.next_stage[context.program.stage[row]] == NONE:
        return _drop
    key, action, note_outputs = context.key(row), context.text(row), context.messenger.note_outputs
    put = _put(context, row)

    def put_detached(step: Step, outputs: Any) -> None:
        note_outputs(key, outputs, action)
        put(step, VersionGuard.detached(outputs))

    return put_detached


def put_gradients(context: CompileContext, row: int) -> Put:
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


def _wait(context: CompileContext, row: int, source: int, take: Callable[[Incoming], Any]) -> Bound:
    """Return the call that waits for a message, and releases those sent ones that have arrived by then."""
    slot, release, (peer, num_arrived) = context.slot(source), context.messenger.release, context.rows.arrived[source]

    def wait(step: Step) -> None:
        step.inputs[slot] = take(step.received[slot])
        step.received[slot] = None
        release(peer, num_arrived)

    return Bound(row, wait, source)
