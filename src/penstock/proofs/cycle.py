"""Proof 2: the orders and dependencies have no cycle; if they have, the shortest one is reported as a chain.

A cycle alternates between two steps: an action waits for one on another rank, and that one is after an action that
waits in turn. A shortest cycle enters each rank once: of two entries the later one reaches all waits of the earlier.

Why a breadth-first search over waits finds it: the steps of a path are its waits, and all rows up to an entry are
reached with it at no cost. So a path may leave a rank by any wait before its entry, and each wait needs one look, since
the first path that comes to it has as few steps as any. A path closes a cycle where it enters the rank of its first
wait at that row or behind it, as nothing there runs before that row. Rows that the walk has run wait for nothing, so
the search leaves them out. Each rank that is stuck waits for another one: so there is a cycle among the rows left.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.ir.deps import NONE
from penstock.ir.hot import Bools, Int32s, Int64s
from penstock.ir.linear_extension import Starts, walk_untimed, whole_starts
from penstock.proofs.report import Subject

MAX_VISITS = 300_000
"""The search looks at so many waits at most; only a large table with very many open waits can exceed it."""


def check_feasible(subject: Subject, predecessor_rows: Int32s) -> Starts | None:
    """Prove that every rank can run its order to the end; return the starts of an untimed walk, None without an end.

    Nothing is before what it needs on its own rank, as `check_positions` proves: so the first column alone decides.
    """
    walk = walk_untimed(subject.schedule, predecessor_rows[:, :1])
    if walk.is_complete:
        return whole_starts(walk)
    cycle = shortest_cycle(subject, predecessor_rows, walk.reached)
    rows, needed = subject.action_row[cycle].tolist(), subject.action_row[predecessor_rows[cycle, 0]].tolist()
    first = rows[0]
    fix = f"Move {subject.text(needed[-1])} before {subject.text(first)} on rank {subject.rank[first]}"
    subject.add(first, _chain(subject, rows, needed), fix)
    return None


def _chain(subject: Subject, rows: list[int], needed: list[int]) -> str:
    """Describe the cycle from its first row back to it; each row waits for the one that it has in `needed`."""
    parts = []
    for awaited, following in zip(needed, [*rows[1:], rows[0]], strict=True):
        link = f"waits for {subject.place(awaited)}"
        if awaited != following:
            link += ", which is after " if awaited > following else ", which is paired with "
            link += subject.text(following)
            link += "" if following == rows[0] else f" (position {subject.position(following)})"
        parts.append(link)
    return ", which ".join(parts)


def shortest_cycle(subject: Subject, predecessor_rows: Int32s, reached: Int64s) -> list[int]:
    """Return the rows that wait in a shortest cycle among those that a walk did not run, from the lowest rank on.

    `reached` is per rank the first row that did not run. Waits for later rows of the own rank are not looked at.
    """
    rank, needed = subject.schedule.rank_of_row, predecessor_rows[:, 0]
    # Per rank, the rows that wait for a row of another rank which did not run, in order.
    waits = np.flatnonzero(needed != NONE)
    target = needed[waits]
    is_open = (waits >= reached[rank[waits]]) & (target >= reached[rank[target]]) & (rank[waits] != rank[target])
    waits = waits[is_open]
    bounds = pairwise(np.searchsorted(waits, subject.schedule.offsets))
    rows = [waits[begin:end].tolist() for begin, end in bounds]
    search = _Search(rows, needed, subject.schedule.joined, rank)
    # Nearest to where the ranks are stuck first: a short cycle that is found early cuts the other searches off. None is
    # shorter than two waits, since a cycle has at least two ranks.
    starts = [row for rows in search.rows for row in rows]
    for row in sorted(starts, key=lambda row: row - reached[rank[row]]):
        search.start_from(row)
        if len(search.best) == 2 or (search.best and search.num_visits > MAX_VISITS):
            break
    assert search.best, "a walk that does not end has a cycle"
    first = search.best.index(min(search.best))
    return search.best[first:] + search.best[:first]


@dataclass(slots=True)
class _Search:
    """Breadth-first searches from one wait after the other; `best` is the shortest cycle so far.

    A path is the rows that wait, each for another rank, and the next of them is on that rank.
    """

    rows: list[list[int]]
    """The rows of each rank that wait for another rank, in order."""
    needed: Int32s
    """[num_actions] the row that each row waits for."""
    joined: Bools
    rank: Int32s
    best: list[int] = field(default_factory=list)
    """The rows that wait in the shortest cycle."""
    num_visits: int = 0

    def start_from(self, row: int) -> None:
        """Look for a shorter cycle through the wait of one row."""
        explored: dict[int, int] = {}
        frontier = [[row]]
        # The next step makes paths of one wait more; only a cycle shorter than the best is of interest.
        while frontier and (not self.best or len(frontier[0]) + 1 < len(self.best)):
            next_frontier = []
            for path in frontier:
                longer_paths = self._extend(path, explored)
                if longer_paths and self._closes(longer_paths):
                    return
                next_frontier += longer_paths
            frontier = next_frontier

    def _extend(self, path: list[int], explored: dict[int, int]) -> list[list[int]]:
        """Leave the rank that the path has entered by every wait before its entry that is still unexplored."""
        entry = int(self.needed[path[-1]])
        rank = int(self.rank[entry])
        # The entry cannot run before the rows up to it, nor before its partner in a pair. Waits that were explored
        # earlier were reached in as few steps or fewer, so they need no second look.
        begin = explored.get(rank, 0)
        end = bisect_right(self.rows[rank], entry + int(self.joined[entry]))
        explored[rank] = max(begin, end)
        self.num_visits += max(0, end - begin) + 1
        return [[*path, row] for row in self.rows[rank][begin:end]]

    def _closes(self, paths: list[list[int]]) -> bool:
        """Keep the first path whose last wait is for its first row or a row after it."""
        first = paths[0][0]  # and what is after it on its rank, or paired with it, cannot run before it
        begin_of_pair = first - int(first > 0 and self.joined[first - 1])
        for path in paths:
            needed = self.needed[path[-1]]
            if self.rank[needed] == self.rank[first] and needed >= begin_of_pair:
                self.best = path
                return True
        return False
