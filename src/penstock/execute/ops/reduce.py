"""REDUCE_GRAD: the replicas add up what has come to the gradients of a stage.

With two routes on one rank, two stages are the same modules: their gradients are whole behind the later one. Where a
stage is resharded in between, they are whole behind the last of several.
"""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def reduce(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_GRAD."""
    stage, hook = int(context.program.stage[row]), context.parameters.reduce_stage
    reduce_stage, is_last = context.parameters.unit_of[stage].layout.reduce, _is_last(context, row)

    def launch(step: Step) -> None:
        ticket = reduce_stage(stage, is_last=is_last)
        if ticket is not None:
            step.tickets[row] = ticket
        if hook is not None and is_last and step.is_synced:
            step.wait_for(row)  # a caller's function finds the gradients whole
            hook(stage)

    yield Bound(row, launch)


def _is_last(context: CompileContext, row: int) -> bool:
    program, passes = context.program, context.passes
    behind = slice(row + 1, context.rows.rows.stop)
    later = program.stage[behind][program.op[behind] == program.op[row]].tolist()
    own = passes[int(program.stage[row])].stage.modules
    return all(passes[stage].stage.modules != own for stage in later)
