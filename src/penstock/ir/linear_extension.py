"""The linear extension: all actions of all ranks in one order that keeps every dependency, by (start, rank, position).

The starts are those of an untimed walk, in which B takes two units and all others one. Lowering places messages by this
order, and where a program's messages keep it, that proves that they cannot deadlock. A message comes right after the
action that makes it, or where that action ends: before all actions that start then or later.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import deciding
from penstock.ir.hot import Array, Int32s, Int64s
from penstock.ir.operations import OPERATIONS, Op
from penstock.ir.table import Table
from penstock.ir.walk import Walk, walk

Starts = NDArray[np.unsignedinteger[Any]]
UNITS = np.array([OPERATIONS[op].units for op in Op], np.int8)


def walk_untimed(table: Table, predecessors: Int32s) -> Walk:
    """Run a table of actions alone, each as early as possible."""
    return walk(table.offsets, deciding(predecessors), table.joined, UNITS[table.op])


def whole_starts(walked: Walk) -> Starts:
    """[num_rows] the starts of a complete untimed walk, which are whole numbers, in as few bytes as hold them."""
    last = walked.start.max(initial=0)
    return walked.start.astype(np.uint16 if last <= np.iinfo(np.uint16).max else np.uint32)


def linear_extension(start: Starts) -> Int64s:
    """[num_rows] the rows by start, then rank, then position."""
    # Rows are stored rank after rank, so a stable sort breaks ties by rank. Numpy sorts 16-bit numbers in linear time,
    # others by merging sorted runs.
    return np.argsort(start, kind="stable")


def order_by_ends(table: Table, start: Starts, makers: Array) -> Int64s:
    """[num_rows + num_messages] the rows of a table of actions at their starts, and messages where their makers end.

    Message n, which the row `makers[n]` makes, is number num_rows + n; messages that leave together keep their order.
    Those of an overlapped pair leave when both actions have run.
    """
    # Doubled, with starts odd and ends even: messages of makers that end at t come before actions that start at t.
    times = np.concatenate([2 * start.astype(np.int64) + 1, 2 * whole_ends(table, start)[makers]])
    return np.argsort(times, kind="stable")


def whole_ends(table: Table, start: Starts) -> Int64s:
    """[num_rows] when actions end in an untimed walk; those of an overlapped pair end together."""
    end = start + UNITS.astype(np.int64)[table.op]
    first = np.flatnonzero(table.joined)
    # Both start at once, and the pair takes the sum of their units: end 1 + (end 2 - start).
    end[first] = end[first + 1] = end[first] + end[first + 1] - start[first]
    return end
