"""When a sharded unit is whole: its weights while they are gathered, its gradients until they are reduced.

    0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD 1UNSHARD ... 0UNSHARD 1F0
    weights  ================================
    gradients    ==================================================

1F0 waits for the gather of stage 1, which runs behind the reduction: before 1F0 the reduction is over, and nobody knows
earlier that it is. A unit is sharded if some row gathers it.
"""

from typing import NamedTuple

import numpy as np

from penstock.ir.awaits import collective_of_row
from penstock.ir.collectives import DROPS, GATHERS, MAKES_GRADIENT, REDUCES_REPLICAS
from penstock.ir.hot import Array, Bools, Int64s
from penstock.ir.program import Program
from penstock.ir.table import Ints
from penstock.placement import stages_without_copies


class WholeGradients(NamedTuple):
    """The times in which units have whole gradients, an entry of each column per time."""

    unit: Int64s
    begin: Int64s
    """The row that makes the first part of them."""
    end: Int64s
    """The last row that runs while they are there."""


def is_sharded(program: Program) -> Bools:
    """[num_stages] which stages belong to a unit that is sharded."""
    gathered = np.zeros(program.num_stages, np.bool_)
    gathered[program.unit_of_stage[program.stage[program.rows_of(GATHERS)]]] = True
    return np.asarray(gathered[program.unit_of_stage])


def sums_of_units(program: Program, of_stages: Array) -> Array:
    """[num_stages] the sum over the unit of each stage; copies of a stage on one rank count once."""
    sums, stages = np.zeros_like(of_stages), stages_without_copies(program.placement)
    np.add.at(sums, program.unit_of_stage[stages], of_stages[stages])
    return np.asarray(sums[program.unit_of_stage])


def num_whole(program: Program) -> Int64s:
    """[num_rows] how many sharded units of the row's rank are whole while it runs, those being gathered included."""
    is_dropped = DROPS[program.op] & is_sharded(program)[program.stage]
    changes = GATHERS[program.op].astype(np.int64)
    changes[1:] -= is_dropped[:-1]  # what a row drops is still there while it runs
    firsts = program.offsets[:-1][np.diff(program.offsets) > 0]
    changes[firsts] = GATHERS[program.op[firsts]]
    counts = np.cumsum(changes)
    count_before_rank = np.append(0, counts)[firsts]  # by the ranks before
    return np.asarray(counts - np.repeat(count_before_rank, np.diff(np.append(firsts, program.num_rows))))


def peak_whole(program: Program) -> list[int] | None:
    """Per rank, the most sharded units that are whole at once; None for a program that gathers nothing."""
    if not len(program.rows_of(GATHERS)):
        return None
    num_whole_units = num_whole(program)
    return [int(num_whole_units[rows].max(initial=0)) for rows in program.ranks]


def have_new_gradients(program: Program, rows: Ints) -> Bools:
    """[len(rows)] whether the unit of each row has made gradients since the row before of the same unit.

    The rows ascend, and name a stage; before the first row of a unit, all gradients since the start count.
    """
    unit, num_rows = program.unit_of_stage[program.stage[rows]], program.num_rows
    gradient_rows = program.rows_of(MAKES_GRADIENT)
    keys = np.sort(program.unit_of_stage[program.stage[gradient_rows]] * num_rows + gradient_rows)
    num_until_row = np.searchsorted(keys, unit * num_rows + rows)
    in_order = np.argsort(unit, kind="stable")
    # Of the unit's first row, the gradients of the units before it have been made.
    num_before = np.searchsorted(keys, unit * num_rows)
    same_unit = np.flatnonzero(np.diff(unit[in_order]) == 0)
    num_before[in_order[same_unit + 1]] = num_until_row[in_order[same_unit]]
    return np.asarray(num_until_row > num_before)


def whole_gradients(program: Program) -> WholeGradients:
    """Find the times in which sharded units have whole gradients."""
    sharded, num_rows = is_sharded(program), program.num_rows
    rows = program.rows_of(MAKES_GRADIENT | REDUCES_REPLICAS)
    rows = rows[sharded[program.stage[rows]]]
    unit = program.unit_of_stage[program.stage[rows]]
    in_order = np.argsort(unit, kind="stable")  # unit after unit, each in the order of its rank
    rows, unit = rows[in_order], unit[in_order]
    is_made = MAKES_GRADIENT[program.op[rows]]
    follows = np.append(False, (unit[1:] == unit[:-1]) & is_made[:-1])
    begin = np.flatnonzero(is_made & ~follows)
    # Behind the last gradient before it is a reduction, or the end of the unit.
    reductions = np.append(np.flatnonzero(~is_made), len(rows))
    reduced = reductions[np.searchsorted(reductions, begin)]
    is_reduced = np.append(unit, -1)[reduced] == unit[begin]
    end = program.offsets[program.rank_of_row[rows[begin]] + 1].astype(np.int64) - 1
    # A rank knows that a reduction is over at a row that awaits it, or what the replicas exchange later; if that is in
    # an overlapped pair, at the pair. The row before is the last that runs while the gradients are there.
    awaited = np.maximum.accumulate(collective_of_row(program))  # of another rank's rows, all are later ones
    last = np.searchsorted(awaited, np.append(rows, num_rows)[reduced[is_reduced]]) - 1
    end[is_reduced] = np.minimum(end[is_reduced], last - program.joined[last])
    return WholeGradients(unit[begin], rows[begin], end)
