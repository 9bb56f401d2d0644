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
from penstock.lowering.align import Clock

Rows = NDArray[np.int64]


def place_reductions(program: Program, *, aligned: bool = False) -> Program:
    """Add the reductions of gradients: over replicas, and over the ranks that hold copies of a tied parameter.

    With `aligned`, those of different ranks start together (`lowering.align`); where units are dropped,
    `place_gathers` sees to it. A forward-only program has no gradients and stays as it is.
    """
    if program.is_forward_only:
        return program
    # There are three sorts of new rows: a reduction before each RESHARD that would drop new gradients of a unit, one
    # behind the last backward of each stage, and at the end of a rank one for each of its tied groups.
    reshards = program.rows_of(DROPS)
    reshards = reshards[have_new_gradients(program, reshards)]
    resharded_units = program.unit_of_stage[program.stage[reshards]]
    stages, last_backwards = _last_gradients(program)
    if aligned and len(stages):
        in_order = np.argsort(last_backwards, kind="stable")  # those that come to one place keep their order
        stages, last_backwards = stages[in_order], _together(program, last_backwards[in_order])
    index_stage_pairs = [(index, stage) for index, group in enumerate(program.tied_groups) for stage in sorted(group)]
    tied_groups, tied_stages = np.array(index_stage_pairs, np.int64).reshape(-1, 2).T
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int64)
    last_rows_of_ranks = program.offsets[rank_of_stage[tied_stages] + 1] - 1
    # The key of a new row says before or after which row it is inserted.
    key = np.concatenate([
        NewRows.before(reshards),
        NewRows.after(behind_sends(program, last_backwards)),
        NewRows.after(last_rows_of_ranks),
    ])  # fmt: skip
    stage = np.concatenate([resharded_units, stages, tied_stages])
    op = np.repeat([Op.REDUCE_GRADIENT, Op.REDUCE_TIED], [len(stage) - len(tied_stages), len(tied_stages)])
    peer = np.concatenate([resharded_units, stages, tied_groups])
    zeros = np.zeros(len(stage), np.int32)
    rows = NewRows(key, rank_of_stage[stage], op, stage, zeros, zeros, peer)
    return program.inserted(rows, omits_reductions=False)


def _last_gradients(program: Program) -> tuple[Rows, Rows]:
    """Return the stages, or units, whose last gradients no RESHARD follows, and the rows that end their last backwards.

    A unit that is resharded counts as one, under the number of its first stage; the stages of others count one by one.
    """
    reshards = program.rows_of(DROPS)
    last_reshard = np.full(program.num_stages, -1, np.int64)
    last_reshard[program.unit_of_stage[program.stage[reshards]]] = reshards  # rows ascend: the last assignment stays
    is_resharded = last_reshard[program.unit_of_stage] >= 0
    unit_or_stage = np.where(is_resharded, program.unit_of_stage, np.arange(program.num_stages))
    last_backward = np.full(program.num_stages, -1, np.int64)
    np.maximum.at(last_backward, unit_or_stage, program.last_backwards())
    stages = np.flatnonzero((last_backward >= 0) & (last_backward > last_reshard))
    rows = last_backward[stages]
    return stages, rows + program.joined[rows]


def _together(program: Program, rows: Rows) -> Rows:
    """Return, for rows behind which ranks reduce, later ones behind which they start together."""
    compute_rows = program.compute_rows()
    is_last = ~program.joined[compute_rows]  # of each computation, an overlapped pair being one
    last_rows = compute_rows[is_last].astype(np.int64)
    return last_rows[Clock.of(program).latest_together(np.searchsorted(last_rows, rows))]


def behind_sends(program: Program, rows: Rows) -> Rows:
    """Return, for each row, the last of the sends that follow it directly, or the row itself.

    A collective is put behind these sends: a peer waits for them, and nobody waits for a collective.
    """
    not_sends = np.append(np.flatnonzero(~IS_SEND[program.op]), program.num_rows)
    return np.asarray(not_sends[np.searchsorted(not_sends, rows, side="right")] - 1)
