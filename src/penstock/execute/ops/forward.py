"""F: runs a stage forward. What it saves waits for the backward, and its outputs for the next stage.

It works on the batch, on a message, or on what another stage of this rank made. It keeps its activation, its inputs
where it runs again, and nothing in an evaluation.
"""

from collections.abc import Iterator

from penstock.execute.ops.arrivals import Take, take_arrived, wait_for
from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE
from penstock.ir.keeps import NOTHING
from penstock.ir.operations import Value


def forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle F."""
    value, place = context.rows.keeps(row), context.place(row)
    run = (context.recomputation_of if value == Value.CHECKPOINT else context.passes_of)(row).forward
    microbatch, index = place
    kept, made = context.keys.kept_by(row), context.keys.made_by(row)
    receive = context.rows.awaits(row)
    take = _take_inputs(context, row, receive)
    key, action, note_outputs = context.key(row), context.text(row), context.messenger.layouts.note_outputs
    is_last = context.program.placement.next_stage[key[0]] == NONE

    def run_forward(step: Step) -> None:
        # No name here holds what is kept: a frame that an error or a log keeps would keep activations alive.
        if value == NOTHING:
            outputs, _ = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        else:
            outputs, step.values[kept] = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        if not is_last:
            note_outputs(key, outputs, action)
            step.values[made] = VersionGuard.detached(outputs)

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
    action, key = context.text(source), context.keys.made_by(source)
    return lambda step: (step.values.pop(key).checked(action),)
