"""`RankRows`: for the rows of one rank, where their data come from and go to, and when sent messages have arrived.

It looks at the columns of this rank and of the ranks that it has messages with, and of no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.execute.compile.arrivals import arrived_before, used_after
from penstock.execute.step import RegisterCounts
from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import BEGINS_KEEPING, IS_MESSAGE, IS_RECEIVE, IS_SEND, Op
from penstock.ir.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """The rows of one rank; all rows are numbers in the whole program."""

    rows: range
    counts: RegisterCounts
    sources: list[int]
    """Per row, from 0, the row of this rank that it gets its data from, else NONE."""
    sends: Mapping[int, int]
    """Per row whose result is sent, the send."""
    again: frozenset[int]
    """The forwards that run again, and the rows that do so."""
    arrived: Mapping[int, tuple[int, int]]
    """Per receive: its peer, and how many messages to that peer have arrived for certain once this one is here."""
    used: Mapping[int, list[int]]
    """Per peer, for each message to it in order: the peer's row, from 0, after which it has arrived."""

    @classmethod
    def of(cls, program: Program, rank: int) -> "RankRows":
        """Look at a rank's rows."""
        first, end = program.offsets[rank : rank + 2].tolist()
        nearby = _rows_nearby(program, rank)
        part = program.select(nearby)
        before = predecessors(part)[:, 0]
        own_first, own_end = part.offsets[rank : rank + 2].tolist()
        own, shift = before[own_first:own_end], first - own_first
        is_local = (own >= own_first) & (own < own_end)
        sources = np.where(is_local, own + shift, NONE)
        sends, again = np.flatnonzero(IS_SEND[program.op[first:end]]), program.op[first:end] == Op.RECOMPUTE
        return cls(
            range(first, end),
            _register_counts(program, slice(first, end)),
            sources.tolist(),
            dict(zip(sources[sends].tolist(), (sends + first).tolist(), strict=True)),
            frozenset([*sources[again].tolist(), *(first + np.flatnonzero(again)).tolist()]),
            {row + shift: found for row, found in arrived_before(part, before, rank).items()},
            used_after(part, before, rank),
        )

    def source(self, row: int) -> int:
        """Return the row of this rank that a row gets its data from, NONE if it gets none."""
        return self.sources[row - self.rows.start]


def _rows_nearby(program: Program, rank: int) -> NDArray[np.intp]:
    """The rows of a rank and of those that it has messages with, in order."""
    rows = slice(*program.offsets[rank : rank + 2])
    stages = np.unique(program.peer[rows][IS_MESSAGE[program.op[rows]]])
    ranks = {rank, *(program.placement.rank_of_stage[stage] for stage in stages.tolist())}
    return np.concatenate([np.arange(*program.offsets[each : each + 2], dtype=np.intp) for each in sorted(ranks)])


def _register_counts(program: Program, rows: slice) -> RegisterCounts:
    op, slot = program.op[rows], program.slot[rows]
    counts = (int(slot[flags[op]].max(initial=-1)) + 1 for flags in (BEGINS_KEEPING, IS_RECEIVE, IS_SEND))
    return RegisterCounts(*counts)
