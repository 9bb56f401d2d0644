"""B and I: a whole backward, or the part of one that computes the gradients of inputs and leaves the rest for W."""

from collections.abc import Iterator

from penstock.execute.ops.arrivals import Take, take_arrived, wait_for
from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.ir.deps import NONE


def backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle B."""
    run, take, is_first = context.passes_of(row).backward, _take_gradients(context, row), _is_first(context, row)
    kept, made = context.keys.kept_by(row), context.keys.made_by(row)

    def run_backward(step: Step) -> None:
        gradients = run(step, step.values.pop(kept), take(step))
        if not is_first:
            step.values[made] = gradients

    yield from _waits(context, row)
    yield Bound(row, run_backward)


def backward_input(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle I."""
    run, take, is_first = context.passes_of(row).backward_input, _take_gradients(context, row), _is_first(context, row)
    kept, made = context.keys.kept_by(row), context.keys.made_by(row)

    def run_backward_input(step: Step) -> None:
        gradients, step.values[kept] = run(step, step.values.pop(kept), take(step))
        if not is_first:
            step.values[made] = gradients

    yield from _waits(context, row)
    yield Bound(row, run_backward_input)


def _is_first(context: CompileContext, row: int) -> bool:
    """Whether nobody waits for the gradients of the stage's inputs."""
    return context.program.placement.previous_stage[int(context.program.stage[row])] == NONE


def _waits(context: CompileContext, row: int) -> Iterator[Bound]:
    receive = context.rows.awaits(row)
    if receive != NONE:
        yield wait_for(context, row, receive, context.messenger.receiver.take_gradients)


def _take_gradients(context: CompileContext, row: int) -> Take:
    """Return what gets the gradients of the stage's outputs."""
    receive = context.rows.awaits(row)
    if receive != NONE:
        return take_arrived(context, receive)
    source = context.rows.source(row)
    if source == NONE:
        return lambda step: ()  # a last stage begins at its loss
    key = context.keys.made_by(source)
    return lambda step: step.values.pop(key)
