"""F: runs a stage forward. What it saves waits for the backward, and its outputs for the next stage.

Where it gets what it works on, and where it puts what it makes:

    the batch        of a first stage
    step.received    what a message brought, after the call that waits for it
    step.made        what a row made for its send, or for another stage of this rank
    step.saved       what a stage keeps of a forward
"""

from collections.abc import Iterator

from penstock.execute.ops.arrivals import Take, take_arrived, wait_for
from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE


def forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle F."""
    run, place, slot = context.passes_of(row).forward, context.place(row), context.slot(row)
    microbatch, index = place
    receive = context.rows.awaits(row)
    take = _take_inputs(context, row, receive)
    key, action, note_outputs = context.key(row), context.text(row), context.messenger.layouts.note_outputs
    is_last = context.program.placement.next_stage[key[0]] == NONE

    def run_forward(step: Step) -> None:
        outputs, step.saved[slot] = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        if not is_last:
            note_outputs(key, outputs, action)
            step.made[row] = VersionGuard.detached(outputs)

    if receive != NONE:
        yield wait_for(context, row, receive, context.messenger.receiver.take_tree)
    yield Bound(row, run_forward)


def _take_inputs(context: CompileContext, row: int, receive: int) -> Take:
    """Return what gets the inputs, as a tuple."""
    if receive != NONE:
        take = take_arrived(context, receive)
        return lambda step: (take(step),)
    source = context.rows.source(row)
    if source == NONE:
        microbatch, index = context.place(row)
        return lambda step: step.slices[microbatch][index].args
    action = context.text(source)
    return lambda step: (step.made.pop(source).checked(action),)
