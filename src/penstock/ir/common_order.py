"""The common order: all actions of all ranks in one order that keeps every dependency, by (start, rank, position).

The starts are those of an untimed walk, in which B takes two units and all others one. Lowering places messages by this
order, and where a program's messages keep it, that is the proof that they cannot deadlock.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import deciding
from penstock.ir.operations import OPERATIONS, Op
from penstock.ir.table import Table
from penstock.ir.walk import Walk, walk

Starts = NDArray[np.unsignedinteger[Any]]
UNITS = np.array([OPERATIONS[op].units for op in Op], np.float64)


def walk_untimed(table: Table, predecessors: NDArray[np.int32]) -> Walk:
    """Run a table of actions alone, each as early as possible."""
    return walk(table.offsets, deciding(predecessors), table.joined, UNITS[table.op])


def whole_starts(walked: Walk) -> Starts:
    """[num_rows] the starts of a complete untimed walk, which are whole numbers, in as few bytes as hold them."""
    last = walked.start.max(initial=0)
    return walked.start.astype(np.uint16 if last <= np.iinfo(np.uint16).max else np.uint32)


def common_order(start: Starts) -> NDArray[np.int64]:
    """[num_rows] the rows in their common order."""
    # Rows stand rank after rank, and numpy sorts numbers of 16 bits in linear time, others by merging sorted runs.
    return np.argsort(start, kind="stable")
