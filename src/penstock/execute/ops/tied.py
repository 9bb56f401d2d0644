"""REDUCE_TIED: the ranks whose stages hold one parameter add its gradients up."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound


def reduce_tied(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_TIED."""
    run, group = context.hooks.reduce_tied, int(context.program.peer[row])
    yield Bound(row, lambda step: run(group))
