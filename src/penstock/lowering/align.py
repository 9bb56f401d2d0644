"""Where collectives of different ranks start together: at one time of an untimed walk, as far as computations let them.

    looped-bfs of 3 ranks with 2 stages each, 3 microbatches; the times at which ranks come to a gather or reduction

                                 before           after
    rank 0   3UNSHARD             2                2          behind 0F1
    rank 1   4UNSHARD             3                2          behind 1F0, in place of 1F1
    rank 2   5UNSHARD             4                3          behind 2F0, in place of 2F1
    rank 0   3REDUCE_GRAD        18               18          behind 3B2
    rank 1   4REDUCE_GRAD        16               18          behind 1B0, in place of 4B2
    rank 2   5REDUCE_GRAD        14               18          behind 2B1, in place of 5B2

A collective that runs slows down the computations of its rank, and those of the other ranks wait for them. Collectives
that run at one time slow all ranks down at one time, once. This is Megatron-LM's `align_param_gather` and
`align_grad_reduce`. The first gathers of all ranks belong together, then the second ones, and so on; so do reductions.
A gather may start earlier, and a reduction later: gathers start with the first of them, and reductions with the last
one. A rank that has no computation left reduces at once, since it has nothing that could be slowed down.
"""

from typing import NamedTuple

import numpy as np

from penstock.ir.deps import predecessors
from penstock.ir.hot import Int64s
from penstock.ir.linear_extension import walk_untimed, whole_ends
from penstock.ir.program import Program
from penstock.ir.table import Ints


class Clock(NamedTuple):
    """The times of computations in an untimed walk, an entry per computation, an overlapped pair being one."""

    rank: Int64s
    begin: Int64s
    """The time at which the rank comes to a computation: the end of the one before it."""
    end: Int64s

    @classmethod
    def of(cls, program: Program) -> "Clock":
        """Walk through the computations of a program, which can run to their end."""
        actions = program.actions()
        start = walk_untimed(actions, predecessors(actions)).start
        first = np.flatnonzero(~np.append(False, actions.joined[:-1]))
        end = whole_ends(actions, start)[first]
        rank = actions.rank_of_row[first].astype(np.int64)
        begin = np.append(0, end[:-1])
        begin[np.append(True, np.diff(rank) > 0)] = 0
        return cls(rank, begin, end)

    def earliest_together(self, gather: Ints) -> Int64s:
        """Return, for each gather before a computation, the first one before which it starts no earlier than others."""
        common = _common(self.rank[gather], gather, self.begin[gather], np.minimum)
        return np.searchsorted(self._in_order(self.begin), self._key(gather, common))

    def latest_together(self, last: Ints) -> Int64s:
        """Return, for each reduction behind a computation, the last one behind which it starts no later than others."""
        common = np.maximum(_common(self.rank[last], last, self.end[last], np.maximum), self.end[last])
        return np.searchsorted(self._in_order(self.end), self._key(last, common), side="right") - 1

    def _in_order(self, time: Int64s) -> Int64s:
        """One ascending column: computations are in the order of ranks, and those of a rank in the order of time."""
        return self.rank * self._longest + time

    def _key(self, computation: Ints, time: Int64s) -> Int64s:
        return self.rank[computation] * self._longest + time

    @property
    def _longest(self) -> int:
        return int(self.end.max(initial=0)) + 1


def _common(rank: Int64s, computation: Ints, time: Int64s, extreme: np.ufunc) -> Int64s:
    """Return the extreme of the times of collectives that have the same number on their ranks, or an earlier time."""
    in_order = np.lexsort((computation, rank))
    number = np.empty(len(rank), np.int64)
    number[in_order] = np.arange(len(rank)) - np.searchsorted(rank[in_order], rank[in_order])
    common = np.zeros(1 + number.max(initial=-1), np.int64)
    common[number] = time  # some time of each number, for the extreme to begin with
    extreme.at(common, number, time)
    # A rank with few collectives may come to its last one after others have come to later numbers. So that each rank
    # keeps its order, no number has a later time than the next one.
    return np.minimum.accumulate(common[::-1])[::-1][number]
