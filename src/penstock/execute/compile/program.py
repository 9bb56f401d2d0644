"""Compiles the rows of one rank to bound calls, once per program. What an operation does is one entry of `_COMPILE`.

It does not know which schedule it compiles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.execute.compile.compute import (
    compile_backward,
    compile_backward_weight,
    compile_forward,
    compile_recompute,
)
from penstock.execute.compile.context import CompileContext, CompileRow
from penstock.execute.compile.data import rows_that_take_data
from penstock.execute.compile.messages import compile_receive, compile_send_backward, compile_send_forward
from penstock.execute.observing.observer import Observer, observed
from penstock.execute.stages.passes import StagePasses
from penstock.execute.step import Bound, Call, Change
from penstock.ir.operations import Op
from penstock.ir.program import Program

_COMPILE: dict[Op, CompileRow] = {
    Op.FORWARD: compile_forward,
    Op.BACKWARD: compile_backward,
    Op.BACKWARD_INPUT: compile_backward,
    Op.BACKWARD_WEIGHT: compile_backward_weight,
    Op.RECOMPUTE: compile_recompute,
    Op.SEND_FORWARD: compile_send_forward,
    Op.SEND_BACKWARD: compile_send_backward,
    Op.RECEIVE_FORWARD: compile_receive,
    Op.RECEIVE_BACKWARD: compile_receive,
}


@dataclass(frozen=True, slots=True, eq=False)
class CompiledProgram:
    """One rank's part of a program, ready to run."""

    program: Program
    rank: int
    rows: range
    passes: Sequence[StagePasses]
    plain: Sequence[Bound]
    """The calls, one or two per row, in order."""
    observers: Sequence[Observer]
    changes: Sequence[Change]
    bounds: Sequence[Bound]
    """The calls with observers and changes, as they run in every step."""
    data_rows: Mapping[int, int]
    """Per row that takes something of the batch, its microbatch."""

    def bounds_with(self, of_step: Sequence[Observer]) -> Sequence[Bound]:
        """Return the calls for one step, with further observers inside of those of every step."""
        return _around(self.program, self.plain, [*of_step, *self.observers], self.changes) if of_step else self.bounds


def compile_program(
    context: CompileContext, observers: Sequence[Observer] = (), changes: Sequence[Change] = ()
) -> CompiledProgram:
    """Return the calls of one rank, in the order of its rows; `changes` are made around the observers."""
    program, rows = context.program, context.rows.rows
    bounds = [
        bound for row in rows for bound in _COMPILE.get(Op(int(program.op[row])), _compile_collective)(context, row)
    ]
    stages = {index: passes.stage for index, passes in context.passes.items()}
    return CompiledProgram(
        program,
        context.rank,
        rows,
        list(context.passes.values()),
        bounds,
        observers,
        changes,
        _around(program, bounds, observers, changes),
        rows_that_take_data(program, rows, stages),
    )


def _around(
    program: Program, bounds: Sequence[Bound], observers: Sequence[Observer], changes: Sequence[Change]
) -> list[Bound]:
    bounds = observed(observers, program, bounds)
    for change in changes:  # the first is the innermost
        bounds = change(bounds)
    return bounds


def _compile_collective(context: CompileContext, row: int) -> Iterator[Bound]:
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
