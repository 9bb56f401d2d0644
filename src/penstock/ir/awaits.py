"""The launched work that a row waits for, of an earlier row of its rank: a message, a gather, a reload, a reduction.

    1RECV_F0 0UNSHARD 1F0 ... 0F0 ... 0RELOAD0 0F3 0B0 ... 0REDUCE_GRAD 1REDUCE_GRAD 0REDUCE_TIED0 STEP
        1F0 awaits 1RECV_F0, 0F0 awaits 0UNSHARD, 0B0 awaits 0RELOAD0, 0REDUCE_TIED0 awaits both reductions

A row that launches work returns at once. The rows that await it are the first that need what it brings. Gathers and
reductions of a rank run one after the other in the order of the program. So a row that awaits one of them knows of all
that were launched before it that they are over.
"""

import numpy as np

from penstock.ir.collectives import GATHERS, IS_BARRIER, NEEDS_SUMS, REDUCES_REPLICAS
from penstock.ir.deps import NONE, predecessors
from penstock.ir.hot import Int32s, Int64s
from penstock.ir.operations import IS_COMPUTE, IS_COPY, IS_RECEIVE, Op
from penstock.ir.program import Program


def receive_of_row(program: Program, source: Int32s) -> Int32s:
    """[num_rows] the receive whose message a computation waits for; `source` is column 0 of its predecessors."""
    is_awaiting = IS_COMPUTE[program.op] & (source != NONE)
    is_awaiting[is_awaiting] = IS_RECEIVE[program.op[source[is_awaiting]]]
    return np.where(is_awaiting, source, np.int32(NONE))


def launched_before(program: Program) -> list[Int64s]:
    """[num_rows] each, what rows wait for that runs beside the computations: gathers and reductions, then reloads."""
    return [collective_of_row(program), *([reload_of_row(program)] if len(program.rows_of(IS_COPY)) else [])]


def collective_of_row(program: Program) -> Int64s:
    """[num_rows] what a row waits for among the replicas: a computation for a gather, a collective for a reduction."""
    return np.maximum(gather_of_row(program), reduction_of_row(program))  # no row waits for both


def gather_of_row(program: Program) -> Int64s:
    """[num_rows] the gather that a computation waits for, the last one before the first of its unit behind it."""
    gather = np.full(program.num_rows, NONE, np.int64)
    gathers = program.rows_of(GATHERS)
    if not len(gathers):
        return gather
    computes = program.compute_rows()
    # One sorted column of computations, unit after unit; a unit is on one rank, so rows tell earlier from later.
    keys = np.sort(program.unit_of_stage[program.stage[computes]] * program.num_rows + computes)
    unit = program.unit_of_stage[program.stage[gathers]]
    places = np.searchsorted(keys, unit * program.num_rows + gathers)
    is_inside = places < len(keys)
    unit_behind, rows = np.divmod(keys[places[is_inside]], program.num_rows)
    unit, gathers = unit[is_inside], gathers[is_inside]
    is_same = unit_behind == unit
    gather[rows[is_same]] = gathers[is_same]
    return gather


def reduction_of_row(program: Program) -> Int64s:
    """[num_rows] the last reduction over replicas that a tied reduction or the optimizer step waits for."""
    reduction = np.full(program.num_rows, NONE, np.int64)
    joins, reductions = program.rows_of(NEEDS_SUMS), program.rows_of(REDUCES_REPLICAS)
    if not len(joins) or not len(reductions):
        return reduction
    number = np.searchsorted(reductions, joins) - 1
    last = np.append(reductions, NONE)[number]  # NONE where there is none before
    begin = np.maximum(program.offsets[program.rank_of_row[joins]], np.append(0, joins[:-1]))
    reduction[joins] = np.where(last >= begin, last, NONE)
    return reduction


def reload_of_row(program: Program) -> Int64s:
    """[num_rows] the row that has brought back what a computation reads."""
    reload = np.full(program.num_rows, NONE, np.int64)
    for predecessor in predecessors(program).T:
        is_copied = predecessor != NONE
        is_copied[is_copied] = IS_COPY[program.op[predecessor[is_copied]]]
        reload[is_copied] = predecessor[is_copied]
    return reload


def reductions_of_row(program: Program, rank: int) -> dict[int, list[int]]:
    """Per tied reduction or optimizer step of a rank: the reductions over replicas launched since the last of them."""
    first, end = map(int, program.offsets[rank : rank + 2])
    ops = program.op[first:end]
    reductions: dict[int, list[int]] = {}
    launched: list[int] = []
    for row in (first + np.flatnonzero(NEEDS_SUMS[ops] | REDUCES_REPLICAS[ops])).tolist():
        if NEEDS_SUMS[program.op[row]]:
            reductions[row], launched = launched, []
        else:
            launched.append(row)
    return reductions


def num_barriers_before(program: Program) -> Int64s:
    """[num_rows] how many BARRIER rows come before each row on its rank; the n-th ones of all ranks end together."""
    if not any(IS_BARRIER[op] for op in program.ops):
        return np.broadcast_to(np.int64(0), program.num_rows)
    is_barrier = IS_BARRIER[program.op].astype(np.int64)
    num_before = np.append(0, np.cumsum(is_barrier))  # over all ranks, one after another
    return np.asarray(num_before[:-1] - np.repeat(num_before[program.offsets[:-1]], np.diff(program.offsets)))


def copies_of_row(program: Program, rank: int) -> dict[int, list[int]]:
    """Per row of a rank, the OFFLOADs and RELOADs that it waits for, where copies run beside the computations.

    A RELOAD is awaited by the row that reads what it brings. An OFFLOAD is awaited by the second computation behind it,
    where its memory is used again, or by its RELOAD if this comes first; an overlapped pair is one computation.
    """
    first, end = map(int, program.offsets[rank : rank + 2])
    reload, waiting_row = reload_of_row(program), dict[int, int]()
    for row in range(first, end):
        if reload[row] != NONE:
            waiting_row.setdefault(int(reload[row]), row)
    begins = program.is_compute & ~np.append(False, program.joined[:-1])
    computations = first + np.flatnonzero(begins[first:end])
    offload_of_place: dict[tuple[int, ...], int] = {}
    for row in (first + np.flatnonzero(IS_COPY[program.op[first:end]])).tolist():
        place = int(program.stage[row]), int(program.microbatch[row]), int(program.slice[row])
        if program.op[row] == Op.OFFLOAD:
            offload_of_place[place] = row
            later_computations = computations[np.searchsorted(computations, row) :].tolist()
            waiting_row[row] = min([end, *later_computations[1:2]])
        else:
            offload = offload_of_place[place]
            waiting_row[offload] = min(waiting_row[offload], row)
    copies: dict[int, list[int]] = {}
    for copy, row in sorted(waiting_row.items()):
        copies.setdefault(row, []).append(copy)
    return copies
