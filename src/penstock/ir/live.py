"""What is alive while each row runs: activations in counts and bytes, for schedules and programs alike.

    0F0 0F1 0F2 0B0 0F3 0B1
     1   2   3   3   3   3      an activation lives from the start of its F to the end of its B or W

What a row takes counts from its start, what it frees counts until its end. Two joined rows run together: what either
takes is there for both, and what either frees is there until both have ended.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, index_rows
from penstock.ir.operations import NUM_OPS, Op
from penstock.ir.table import Table

Counts = NDArray[np.int64]


def live_activations(table: Table) -> Counts:
    """[num_rows] activations of one stage and microbatch (or slice) that the row's rank holds while the row runs."""
    ones = np.ones(table.num_stages, np.int64)
    return live_bytes(table, ones, ones)


def live_bytes(table: Table, activation_bytes: NDArray[Any], weight_context_bytes: NDArray[Any]) -> Counts:
    """[num_rows] bytes of activations and weight contexts that the row's rank holds while the row runs.

    Both sizes are per stage, [num_stages]. After the input part of a backward, `activation_bytes` become
    `weight_context_bytes` until the weight part has run. Without any backward, an activation ends with its F.
    """
    return np.concatenate(list(_live_by_rank(table, activation_bytes, weight_context_bytes)))


def alive(table: Table, taken: NDArray[Any], freed: NDArray[Any]) -> Counts:
    """[num_rows] what is alive while each row runs, of what rows take at their start and free at their end."""
    return np.concatenate(list(_alive_by_rank(table, taken, freed)))


def peaks(table: Table, live: Counts) -> list[int]:
    """Per rank, the largest value among its rows; 0 for a rank without rows."""
    return _peaks(live[part] for part in _ranks(table))


def peak_activations(table: Table) -> list[int]:
    """Per rank, the most activations alive at once."""
    ones = np.ones(table.num_stages, np.int64)
    return peak_bytes(table, ones, ones)


def peak_bytes(table: Table, activation_bytes: NDArray[Any], weight_context_bytes: NDArray[Any]) -> list[int]:
    """Per rank, the largest value of `live_bytes`, without the column itself."""
    return _peaks(_live_by_rank(table, activation_bytes, weight_context_bytes))


def peak_alive(table: Table, taken: NDArray[Any], freed: NDArray[Any]) -> list[int]:
    """Per rank, the largest value of `alive`, without the column itself."""
    return _peaks(_alive_by_rank(table, taken, freed))


def _peaks(live_by_rank: Iterable[Counts]) -> list[int]:
    return [int(live.max(initial=0)) for live in live_by_rank]


def _ranks(table: Table) -> Iterator[slice]:
    """The rows of each rank."""
    return (slice(begin, end) for begin, end in pairwise(table.offsets.tolist()))


def _live_by_rank(table: Table, saved: NDArray[Any], context: NDArray[Any]) -> Iterator[Counts]:
    freed = np.zeros((NUM_OPS, table.num_stages), np.int64)
    if table.is_forward_only:
        freed[Op.FORWARD] = saved
    freed[Op.BACKWARD] = saved
    freed[Op.BACKWARD_INPUT] = saved - context
    freed[Op.BACKWARD_WEIGHT] = context
    taken = _activations_taken(table, saved)
    for part in _ranks(table):
        which = table.op[part].astype(np.intp) * table.num_stages + table.stage[part]
        yield _alive(table.joined[part], taken(part), freed.take(which))


def taken_bytes(table: Table, activation_bytes: NDArray[Any]) -> Counts:
    """[num_rows] what each row makes of activations."""
    return _activations_taken(table, activation_bytes)(slice(None))


def _activations_taken(table: Table, saved: NDArray[Any]) -> Callable[[slice], Counts]:
    """What rows make of activations; a forward that runs again before its backward leaves that to the second run."""
    taken = np.zeros((NUM_OPS, table.num_stages), np.int64)
    taken[[Op.FORWARD, Op.RECOMPUTE]] = saved
    again = np.empty(0, np.int32)
    if Op.RECOMPUTE in table.ops:
        rows = index_rows(table)
        forwards = rows.plane(Op.FORWARD)[rows.plane(Op.RECOMPUTE) != NONE]
        again = np.sort(forwards[forwards != NONE])

    def of_rows(part: slice) -> Counts:
        found = taken.take(table.op[part].astype(np.intp) * table.num_stages + table.stage[part])
        begin, end, _ = part.indices(table.num_rows)
        found[again[np.searchsorted(again, begin) : np.searchsorted(again, end)] - begin] = 0
        return found

    return of_rows


def _alive_by_rank(table: Table, taken: NDArray[Any], freed: NDArray[Any]) -> Iterator[Counts]:
    for part in _ranks(table):
        yield _alive(table.joined[part], taken[part].astype(np.int64), freed[part].astype(np.int64))


def _alive(joined: NDArray[np.bool_], taken: Counts, freed: Counts) -> Counts:
    """[num_rows] what is alive on one rank; `taken` and `freed` are overwritten."""
    first = np.flatnonzero(joined)
    if len(first):
        taken[first] += taken[first + 1]
        taken[first + 1] = 0
        freed[first + 1] += freed[first]
        freed[first] = 0
    taken[1:] -= freed[:-1]
    return np.cumsum(taken)
