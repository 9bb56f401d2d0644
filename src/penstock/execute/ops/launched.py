"""The waits for what the layout of a unit has launched: a gather of weights, or a reduction of gradients."""

from collections.abc import Iterator, Mapping

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.ir.awaits import gather_of_row, reductions_of_row
from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.deps import NONE


def awaited_of(context: CompileContext) -> Mapping[int, list[int]]:
    """Return, per row of the rank that waits, the rows that launched what it waits for; most layouts launch none."""
    if not any(unit.layout.launches for unit in context.parameters.unit_of.values()):
        return {}
    awaited = reductions_of_row(context.program, context.rank)
    gathers = gather_of_row(context.program)
    for row in context.rows.rows:
        if gathers[row] != NONE:
            awaited.setdefault(row, []).append(int(gathers[row]))
    return awaited


def waits_at_end(context: CompileContext, awaited: Mapping[int, list[int]]) -> Iterator[Bound]:
    """Make the waits for the reductions that no row waits for, behind the last row."""
    if any(unit.layout.launches for unit in context.parameters.unit_of.values()):
        rows, known = context.rows.rows, {launched for own in awaited.values() for launched in own}
        reductions = [row for row in rows if REDUCES_REPLICAS[context.program.op[row]] and row not in known]
        yield from (_wait(rows[-1], row) for row in reductions)


def waits_for_launched(row: int, awaited: Mapping[int, list[int]]) -> Iterator[Bound]:
    """Make the waits of a row, each a call of its own."""
    for launched in awaited.get(row, ()):
        yield _wait(row, launched)


def _wait(row: int, launched: int) -> Bound:
    def wait(step: Step) -> None:
        step.wait_for(launched)

    return Bound(row, wait, launched)
