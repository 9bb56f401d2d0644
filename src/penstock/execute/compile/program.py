"""Compiles the rows of one rank to bound calls, once per program. The handlers in `ops/` know the operations.

It does not know which schedule it compiles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.execute.compile.data import microbatch_of_data_row, microbatch_of_load_row
from penstock.execute.observing.observer import Observer, observed
from penstock.execute.ops import HANDLERS
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.keys import Keys
from penstock.execute.ops.messages import begin_group, end_group
from penstock.execute.ops.parameters import launch_rows_by_waiting_row, waits_for_launched
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
    bounds: Sequence[Bound]
    """The calls, one or more per row, in order, with observers and changes, as they run in every step."""
    bounds_with: Callable[[Sequence[Observer]], Sequence[Bound]]
    """Returns the calls for one step, with further observers inside of those of every step."""
    keys: Keys
    data_rows: Mapping[int, int]
    """Per row that takes something of the batch, its microbatch."""
    load_rows: Mapping[int, int]
    """Per LOAD, its microbatch."""


def compile_program(
    context: CompileContext, observers: Sequence[Observer] = (), changes: Sequence[Change] = ()
) -> CompiledProgram:
    """Compile the rows (instructions) of one rank to a list of calls that take the `Step`, in the order of the rows.

    A `Bound` is one such call with the number of its row; a row becomes one call, or a wait and a call. Each observer
    puts a context around every call. Each of the `changes` then takes the whole list and returns the list that runs in
    its place, such as the one that joins the two calls of an overlapped pair to a single call.
    """
    program, rows = context.program, context.rows.rows
    # Some rows only launch a collective: a gather of weights, or a reduction of gradients. The first row that needs
    # the result waits for it. Reductions that no row waits for are waited for at the end, behind the last row.
    launch_rows = launch_rows_by_waiting_row(context)
    bounds: list[Bound] = []
    for row in rows:
        handler = HANDLERS[Op(int(program.op[row]))]
        bounds += [*waits_for_launched(context, row, launch_rows), *begin_group(context, row)]
        bounds += [*handler(context, row), *end_group(context, row)]
    bounds += waits_for_launched(context, rows.stop, launch_rows)

    def bounds_with(of_step: Sequence[Observer]) -> Sequence[Bound]:
        changed_bounds = observed([*of_step, *observers], program, bounds)
        for change in changes:  # the first is the innermost
            changed_bounds = change(changed_bounds)
        return changed_bounds

    # A streamed batch is pulled right before the rows that take data, so these rows are noted.
    stages = {stage: passes.stage for stage, passes in context.passes.items()}
    return CompiledProgram(
        program,
        rank=context.rank,
        rows=rows,
        passes=list(context.passes.values()),
        bounds=bounds_with(()),
        bounds_with=bounds_with,
        keys=context.keys,
        data_rows=microbatch_of_data_row(program, rows, stages),
        load_rows=microbatch_of_load_row(program, rows),
    )
