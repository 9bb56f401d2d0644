"""Pass: add gradient reductions: one per stage after its last backward, and one per tied group at the end.

    Before: 0F0 0F1 0B0 0B1
    After:  0F0 0F1 0B0 0B1 0REDUCE_GRAD 0REDUCE_TIED0      with stages 0 and 3 tied

    Before: 0UNSHARD 0F0 0F1 0B0 0RESHARD ... 0UNSHARD 0B1 0RESHARD
    After:  0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0RESHARD ... 0UNSHARD 0B1 0REDUCE_GRAD 0RESHARD

REDUCE_GRAD is where a data-parallel reduction starts, as early as the gradients of its stage are whole. A unit that is
resharded is reduced as one, before each RESHARD behind which whole gradients would be left: so as many stages have
whole gradients as have whole weights (ZeRO-2 and ZeRO-3). Tied groups are reduced last, in the order of their index on
every rank, after all messages: so no two ranks can wait for each other.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.collectives import DROPS
from penstock.ir.operations import IS_SEND, Op
from penstock.ir.program import NewRows, Program
from penstock.ir.whole import have_new_gradients

Rows = NDArray[np.int64]


def place_reductions(program: Program) -> Program:
    """Add reductions; a forward-only program has no gradients and stays as it is."""
    if program.is_forward_only:
        return program
    drops = program.rows_of(DROPS)
    drops = drops[have_new_gradients(program, drops)]
    units = program.unit_of_stage[program.stage[drops]]
    stages, last = _last_gradients(program)
    members = [(index, stage) for index, group in enumerate(program.tied_groups) for stage in sorted(group)]
    tied = np.array([stage for _, stage in members], np.int64)
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int64)
    stage = np.concatenate([units, stages, tied])
    ends = program.offsets[rank_of_stage[tied] + 1] - 1
    key = np.concatenate([NewRows.before(drops), NewRows.after(behind_sends(program, last)), NewRows.after(ends)])
    op = np.repeat([Op.REDUCE_GRADIENT, Op.REDUCE_TIED], [len(stage) - len(tied), len(tied)])
    peer = np.concatenate([units, stages, np.array([index for index, _ in members], np.int64)])
    zeros = np.zeros(len(stage), np.int32)
    rows = NewRows(key, rank_of_stage[stage], op, stage, zeros, zeros, peer)
    return program.inserted(rows, omits_reductions=False)


def _last_gradients(program: Program) -> tuple[Rows, Rows]:
    """The stages, or units, whose last gradients no RESHARD follows, and the row that ends their last backward."""
    last, drop = program.last_backwards(), np.full(program.num_stages, -1, np.int64)
    drops = program.rows_of(DROPS)
    drop[program.unit_of_stage[program.stage[drops]]] = drops  # rows ascend, and the last assignment stays
    unit = np.where(drop[program.unit_of_stage] >= 0, program.unit_of_stage, np.arange(program.num_stages))
    last_of_unit = np.full(program.num_stages, -1, np.int64)
    np.maximum.at(last_of_unit, unit, last)
    stages = np.flatnonzero((last_of_unit >= 0) & (last_of_unit > drop))
    rows = last_of_unit[stages]
    return stages, rows + program.joined[rows]


def behind_sends(program: Program, rows: Rows) -> Rows:
    """The last of the sends that follow each row at once: a peer waits for them, nobody waits for a collective."""
    others = np.append(np.flatnonzero(~IS_SEND[program.op]), program.num_rows)
    return np.asarray(others[np.searchsorted(others, rows, side="right")] - 1)
