"""B and I: a whole backward, or the part of one that computes the gradients of inputs and leaves the rest for W."""

from collections.abc import Iterator

from penstock.execute.ops.arrivals import Take, take_arrived, wait_for
from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.ir.deps import NONE


def backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle B."""
    return _backward(context, row, is_whole=True)


def backward_input(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle I."""
    return _backward(context, row, is_whole=False)


def _backward(context: CompileContext, row: int, *, is_whole: bool) -> Iterator[Bound]:
    passes, slot = context.passes_of(row), context.slot(row)
    run = passes.backward if is_whole else passes.backward_input
    receive = context.rows.awaits(row)
    take = _take_gradients(context, row, receive)
    is_first = context.program.placement.previous_stage[context.program.stage[row]] == NONE

    def run_backward(step: Step) -> None:
        gradients = run(step, step.saved[slot], take(step))
        if not is_first:
            step.made[row] = gradients
        if is_whole:
            del step.saved[slot]  # now: what forwards save is most of the memory of a step

    if receive != NONE:
        yield wait_for(context, row, receive, context.messenger.receiver.take_gradients)
    yield Bound(row, run_backward)


def _take_gradients(context: CompileContext, row: int, receive: int) -> Take:
    """Return what gets the gradients of the stage's outputs."""
    if receive != NONE:
        return take_arrived(context, receive)
    source = context.rows.source(row)
    if source == NONE:
        return lambda step: ()  # a last stage begins at its loss
    return lambda step: step.made.pop(source)
