"""The operations on parameters of a stage: UNSHARD and RESHARD, REDUCE_GRAD and REDUCE_TIED, and STEP.

The layout of a unit may launch a gather of weights, or a reduction of gradients, which goes on until a row needs it.
The waits for it are made here too.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from penstock.execute.ops.context import CompileContext
from penstock.execute.parameters.layout import ParameterLayout
from penstock.execute.step import Bound, Step
from penstock.ir.awaits import copies_of_row, gather_of_row, reductions_of_row
from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.deps import NONE


def unshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle UNSHARD: launch the gather that makes the parameters of a stage whole."""
    launch = _layout_of(context, row).unshard

    def launch_gather(step: Step) -> None:
        if (ticket := launch()) is not None:
            step.tickets[row] = ticket

    yield Bound(row, launch_gather)


def reshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RESHARD: the parameters of a stage lie in parts again, as their layout has it."""
    drop = _layout_of(context, row).reshard
    yield Bound(row, lambda step: drop())


def reduce(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_GRAD: the replicas add up what has come to the gradients of a stage.

    With two routes on one rank, two stages are the same modules: their gradients are whole behind the later one. Where
    a stage is resharded in between, they are whole behind the last of several.
    """
    stage, hook = int(context.program.stage[row]), context.parameters.reduce_stage
    reduce_stage = _layout_of(context, row).reduce
    is_last = _is_last(context, row)

    def launch(step: Step) -> None:
        if (ticket := reduce_stage(stage, is_last=is_last)) is not None:
            step.tickets[row] = ticket
        if hook is not None and is_last and step.is_synced:
            step.wait_for(row)  # a caller's function finds the gradients whole
            hook(stage)

    yield Bound(row, launch)


def reduce_tied(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_TIED: the ranks whose stages hold one parameter add its gradients up."""
    group = int(context.program.peer[row])
    messenger = context.messenger
    copy, store = context.parameters.copies[group], context.parameters.store_of(group)

    def reduce_copy(step: Step) -> None:
        for peer in copy.ranks:
            messenger.receiver.post_waiting(peer)  # the exchange goes behind them, on the same channels
        copy.reduce(messenger.transport, store if step.sums_tied else None)

    yield Bound(row, reduce_copy)


def optimizer_step(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle STEP: all ranks take the optimizer step that the pipeline was given."""
    step_optimizer = context.parameters.step_optimizer
    yield Bound(row, lambda step: step_optimizer())


def launch_rows_by_waiting_row(context: CompileContext) -> Mapping[int, list[int]]:
    """Return the rows that launch a collective or a copy to or from the host, by the row of the rank that waits for it.

    The key `rows.stop`, the end of the program, has the reductions that no row waits for. Most layouts of parameters
    launch nothing.
    """
    launches_by_row = copies_of_row(context.program, context.rank) if context.launches_copies else {}
    if any(unit.layout.launches for unit in context.parameters.unit_of.values()):
        for row, launch_rows in _collectives_by_waiting_row(context).items():
            launches_by_row[row] = [*launch_rows, *launches_by_row.get(row, ())]
    return launches_by_row


def _collectives_by_waiting_row(context: CompileContext) -> dict[int, list[int]]:
    program, rows = context.program, context.rows.rows
    launches_by_row = reductions_of_row(program, context.rank)
    awaited_rows = {launch_row for rows_of_wait in launches_by_row.values() for launch_row in rows_of_wait}
    gathers = gather_of_row(program)
    for row in rows:
        if gathers[row] != NONE:
            launches_by_row.setdefault(row, []).append(int(gathers[row]))
    launches_by_row[rows.stop] = [row for row in rows if REDUCES_REPLICAS[program.op[row]] and row not in awaited_rows]
    return launches_by_row


def waits_for_launched(context: CompileContext, row: int, launches_by_row: Mapping[int, list[int]]) -> Iterator[Bound]:
    """Make the waits of a row, each a call of its own; those behind the last row belong to that one."""
    for launch_row in launches_by_row.get(row, ()):
        yield Bound(min(row, context.rows.rows[-1]), partial(Step.wait_for, row=launch_row), launch_row)


def _layout_of(context: CompileContext, row: int) -> ParameterLayout:
    return context.parameters.unit_of[int(context.program.stage[row])].layout


def _is_last(context: CompileContext, row: int) -> bool:
    program, passes = context.program, context.passes
    later_rows = slice(row + 1, context.rows.rows.stop)
    later_stages = program.stage[later_rows][program.op[later_rows] == program.op[row]].tolist()
    modules = passes[int(program.stage[row])].stage.modules
    return all(passes[stage].stage.modules != modules for stage in later_stages)
