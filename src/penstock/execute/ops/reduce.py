"""REDUCE_GRAD: the gradients of a stage are whole, and its replicas add theirs up."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound


def reduce(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_GRAD."""
    reduce_stage, stage = context.hooks.reduce_stage, int(context.program.stage[row])
    yield Bound(row, lambda step: reduce_stage(stage))
