"""What is alive while each row runs: activations in counts and bytes, for schedules and programs alike.

    0F0 0F1 0F2 0B0 0F3 0B1
     1   2   3   3   3   3      an activation lives from the start of its F to the end of its B or W

What a row takes counts from its start, what it frees counts until its end. Two joined rows run together: what either
takes is there for both, and what either frees is there until both have ended.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

Counts = NDArray[np.int64]


def live_activations(table: Schedule | Program) -> Counts:
    """[num_rows] activations of one stage and microbatch (or slice) that the row's rank holds while the row runs."""
    ones = np.ones(table.num_stages, np.int64)
    return live_bytes(table, ones, ones)


def live_bytes(table: Schedule | Program, activation_bytes: NDArray[Any], weight_context_bytes: NDArray[Any]) -> Counts:
    """[num_rows] bytes of activations and weight contexts that the row's rank holds while the row runs.

    Both sizes are per stage, [num_stages]. After the input part of a backward, `activation_bytes` become
    `weight_context_bytes` until the weight part has run. Without any backward, an activation ends with its F.
    """
    code = _ops(table)
    saved, context = activation_bytes[table.stage], weight_context_bytes[table.stage]
    taken = np.where(code == Kind.FORWARD, saved, 0).astype(np.int64)
    if table.is_forward_only:
        return alive(table, taken, taken)
    freed = np.where(code == Kind.BACKWARD, saved, 0)
    freed = np.where(code == Kind.BACKWARD_INPUT, saved - context, freed)
    freed = np.where(code == Kind.BACKWARD_WEIGHT, context, freed)
    return alive(table, taken, freed.astype(np.int64))


def alive(table: Schedule | Program, taken: Counts, freed: Counts) -> Counts:
    """[num_rows] what is alive while each row runs, of what rows take at their start and free at their end."""
    first = np.flatnonzero(table.joined)
    if len(first):
        taken, freed = taken.copy(), freed.copy()
        taken[first] += taken[first + 1]
        taken[first + 1] = 0
        freed[first + 1] += freed[first]
        freed[first] = 0
    balance = np.concatenate([[0], np.cumsum(taken - freed)])
    at_start_of_rank: Counts = np.repeat(balance[table.offsets[:-1]], np.diff(table.offsets))
    return balance[:-1] + taken - at_start_of_rank


def peaks(table: Schedule | Program, live: Counts) -> list[int]:
    """Per rank, the largest value among its rows; 0 for a rank without rows."""
    offsets = table.offsets
    return [int(live[offsets[rank] : offsets[rank + 1]].max(initial=0)) for rank in range(table.num_ranks)]


def peak_activations(table: Schedule | Program) -> list[int]:
    """Per rank, the most activations alive at once."""
    return peaks(table, live_activations(table))


def _ops(table: Schedule | Program) -> NDArray[Any]:
    return table.kind if isinstance(table, Schedule) else table.op
