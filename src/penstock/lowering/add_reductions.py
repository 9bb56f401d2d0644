"""Pass: add gradient reductions: one per stage after its last backward, and one per tied group at the end.

    Before: 0F0 0F1 0B0 0B1
    After:  0F0 0F1 0B0 0B1 0REDUCE_GRAD 0REDUCE_TIED0      with stages 0 and 3 tied

REDUCE_GRAD is where a data-parallel reduction starts, as early as the gradients of its stage are whole. Tied groups are
reduced last, in the order of their index on every rank, after all messages: so no two ranks can wait for each other.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program


def add_reductions(program: Program) -> Program:
    """Add reductions; a forward-only program has no gradients and stays as it is."""
    if program.is_forward_only:
        return program
    after, op, stage, peer = _stage_reductions(program)
    for index, group in enumerate(program.tied_groups):
        for member in sorted(group):
            rank = program.placement.rank_of_stage[member]
            after.append(int(program.offsets[rank + 1]) - 1)
            op.append(Op.REDUCE_TIED)
            stage.append(member)
            peer.append(index)
    anchor = np.array(after, np.int64)
    zeros: NDArray[np.int32] = np.zeros(len(after), np.int32)
    ranks = np.array(program.placement.rank_of_stage, np.int64)[np.array(stage, np.int64)]
    rows = NewRows(NewRows.after(anchor), ranks, np.array(op), np.array(stage), zeros, zeros, np.array(peer))
    return program.inserted(rows, omits_reductions=False)


def _stage_reductions(program: Program) -> tuple[list[int], list[int], list[int], list[int]]:
    """Columns (row that it comes after, op, stage, peer) of one REDUCE_GRAD per stage."""
    last = program.last_backwards()
    last_row = last + program.joined[last]
    stages = [stage for stage in range(program.num_stages) if last[stage] >= 0]
    after = [_behind_sends(program, int(last_row[stage])) for stage in stages]
    return after, [Op.REDUCE_GRADIENT] * len(stages), list(stages), list(stages)


def _behind_sends(program: Program, row: int) -> int:
    """The last of the sends that follow the row at once: a peer waits for them, nobody waits for the reduction."""
    while row + 1 < program.num_instructions and Op(int(program.op[row + 1])).is_send:
        row += 1
    return row
