"""Rows that are neither computations nor messages: reductions and the optimizer step call the rank's hooks."""

from collections.abc import Iterator

from penstock.execute.calls import Bound, Call
from penstock.execute.compile.context import CompileContext
from penstock.ir.operations import Op


def compile_collective(context: CompileContext, row: int) -> Iterator[Bound]:
    """Call a hook. Parameters are not sharded, so gathering and dropping them is nothing."""
    hooks, stage, group = context.hooks, int(context.program.stage[row]), int(context.program.peer[row])
    calls: dict[Op, Call] = {
        Op.UNSHARD: lambda step: None,
        Op.RESHARD: lambda step: None,
        Op.REDUCE_GRADIENT: lambda step: hooks.reduce_stage(stage),
        Op.REDUCE_TIED: lambda step: hooks.reduce_tied(group),
        Op.OPTIMIZER_STEP: lambda step: hooks.optimizer_step(),
    }
    yield Bound(row, calls[Op(int(context.program.op[row]))])
