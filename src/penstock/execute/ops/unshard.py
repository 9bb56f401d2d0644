"""UNSHARD and RESHARD: the parameters of a stage become whole, and lie in parts again, as their layout has it."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def unshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle UNSHARD: launch the gather."""
    launch = context.parameters.unit_of[int(context.program.stage[row])].layout.unshard

    def launch_gather(step: Step) -> None:
        ticket = launch()
        if ticket is not None:
            step.tickets[row] = ticket

    yield Bound(row, launch_gather)


def reshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RESHARD."""
    drop = context.parameters.unit_of[int(context.program.stage[row])].layout.reshard
    yield Bound(row, lambda step: drop())
