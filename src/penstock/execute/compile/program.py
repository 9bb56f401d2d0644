"""Compiles the rows of one rank to bound calls, once per program. The handlers in `ops/` know the operations.

It does not know which schedule it compiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.execute.compile.data import rows_that_take_data
from penstock.execute.observing.observer import Observer, observed
from penstock.execute.ops import HANDLERS
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.keys import Keys
from penstock.execute.ops.parameters import awaited_of, waits_for_launched
from penstock.execute.stages.passes import StagePasses
from penstock.execute.step import Bound, Change
from penstock.ir.operations import Op
from penstock.ir.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class CompiledProgram:
    """One rank's part of a program, ready to run."""

    program: Program
    rank: int
    rows: range
    passes: Sequence[StagePasses]
    plain: Sequence[Bound]
    """The calls, one or more per row, in order."""
    observers: Sequence[Observer]
    changes: Sequence[Change]
    bounds: Sequence[Bound]
    """The calls with observers and changes, as they run in every step."""
    keys: Keys
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
    awaited = awaited_of(context)
    bounds = [
        bound
        for row in rows
        for bound in (*waits_for_launched(context, row, awaited), *HANDLERS[Op(int(program.op[row]))](context, row))
    ]
    bounds += waits_for_launched(context, rows.stop, awaited)
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
        context.keys,
        rows_that_take_data(program, rows, stages),
    )


def _around(
    program: Program, bounds: Sequence[Bound], observers: Sequence[Observer], changes: Sequence[Change]
) -> list[Bound]:
    bounds = observed(observers, program, bounds)
    for change in changes:  # the first is the innermost
        bounds = change(bounds)
    return bounds
