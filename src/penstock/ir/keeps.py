"""The value that each forward keeps for its backward: its activation, its inputs alone where it runs again, or nothing.

    0F0 0F1 0R1 0B1 0B0      0F0 keeps its ACTIVATION, 0F1 its CHECKPOINT, since 0R1 makes the activation again

Without any backward nothing is kept: an activation ends with its forward. A copy moves what its forward keeps.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import identities_of
from penstock.ir.operations import BEGINS_KEEPING, MAKES_KEPT, Op, Value
from penstock.ir.table import Table

NOTHING = 0
"""Stands for "no value" beside the numbers of values."""


def keeps(table: Table, rows: slice | None = None) -> NDArray[np.int8]:
    """[num_rows] the `Value` that each row begins to keep or moves, or `NOTHING`; `rows` are all of whole ranks."""
    part = slice(0, table.num_rows) if rows is None else rows
    op = table.op[part]
    values = np.full(len(op), NOTHING, np.int8)
    is_named = MAKES_KEPT[op]
    if table.is_forward_only:
        is_named &= ~BEGINS_KEEPING[op]
    values[is_named] = Value.ACTIVATION
    is_recompute = op == Op.RECOMPUTE
    if is_recompute.any():
        identity = identities_of(table, part)
        values[is_named & np.isin(identity, identity[is_recompute])] = Value.CHECKPOINT
    return values
