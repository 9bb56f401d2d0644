"""`in_rounds`: a schedule or program for another number of microbatches, from the rows that it has.

    Before, 2 microbatches:  0F0 0F1 0B0 0B1 0REDUCE_GRAD
    After, for 5:            0F0 0F1 0B0 0B1 | 0F2 0F3 0B2 0B3 | 0F4 0B4 0REDUCE_GRAD

A round is the whole order once, for the next microbatches; the last round is cut to those that remain. Ranks do not
wait for each other between rounds. What holds of a proved table holds of its rounds: on each channel the messages come
in the same order, each rank's buffers are empty again at the end of a round, and a rank never holds more than in one
round. A cut leaves out whole microbatches, and so no row that another one needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.ir.operations import NAMES_MICROBATCH, NEEDS_BACKWARD
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, short_type

_Rows = NDArray[np.intp]
_Table = TypeVar("_Table", Schedule, Program)


def in_rounds(table: _Table, num_microbatches: int) -> _Table:
    """Return a table for so many microbatches, whose ranks run the order of `table` round after round.

    Of a program, rows that name no microbatch run in every round, but reductions and the optimizer step in the last
    one alone. So it is not for programs that gather sharded weights, which reduce gradients before they drop a stage:
    take their schedule in rounds, and lower that.

    Raises:
        ConfigError: a training table has more routes than there are microbatches, so that a copy of the model would
            have no gradient.
    """
    num_of_round, num_routes = table.num_microbatches, len(table.placement.routes)
    if num_microbatches == num_of_round:
        return table
    if num_microbatches < num_routes and not table.is_forward_only:
        raise ConfigError(
            f"{num_microbatches}, but {table.name} trains {num_routes} copies of the model, by a route each; use "
            f"{num_routes} or more",
            key="microbatches",
        )
    num_whole_rounds, num_last = divmod(num_microbatches, num_of_round)
    chosen = [np.arange(num_of_round)] * num_whole_rounds
    if num_last:
        chosen.append(_spread_over_routes(table.route_of_microbatch, num_last))
    rows_of_rounds = [_rows_of_round(table, of_round, is_last=False) for of_round in chosen[:-1]]
    rows_of_rounds.append(_rows_of_round(table, chosen[-1], is_last=True))
    return _joined_rounds(table, chosen, rows_of_rounds)


def _spread_over_routes(routes: Ints, number: int) -> _Rows:
    """Return so many microbatches, ascending: the first ones of every route in turn."""
    place_in_route = np.zeros(len(routes), np.intp)
    for route in np.unique(routes):
        of_route = np.flatnonzero(routes == route)
        place_in_route[of_route] = np.arange(len(of_route))
    return np.sort(np.lexsort((routes, place_in_route))[:number])


def _rows_of_round(table: Schedule | Program, chosen: _Rows, *, is_last: bool) -> _Rows:
    """Return the rows that a round runs for its microbatches."""
    is_run = np.isin(table.microbatch, chosen) | ~NAMES_MICROBATCH[table.op]
    return np.flatnonzero(is_run if is_last else is_run & ~NEEDS_BACKWARD[table.op])


def _joined_rounds(table: _Table, chosen: Sequence[_Rows], rows_of_rounds: Sequence[_Rows]) -> _Table:
    """Put rounds together; `chosen` has, for each, its microbatches by their numbers in `table`, as its rows do."""
    row = np.concatenate(rows_of_rounds)
    round_of_row = np.repeat(np.arange(len(chosen)), list(map(len, rows_of_rounds)))
    # Rank after rank, each with its rounds in turn: `row` ascends within a round, and the sort is stable.
    in_order = np.lexsort((round_of_row, table.rank_of_row[row]))
    row, round_of_row = row[in_order], round_of_row[in_order]
    ends = list(accumulate(map(len, chosen)))
    new_number: NDArray[np.int64] = np.zeros((len(chosen), table.num_microbatches), np.int64)
    for index, (of_round, end) in enumerate(zip(chosen, ends, strict=True)):
        new_number[index, of_round] = np.arange(end - len(of_round), end)
    columns: dict[str, Any] = {name: getattr(table, name)[row] for name in table.COLUMNS}
    numbers = np.where(NAMES_MICROBATCH[columns["op"]], new_number[round_of_row, columns["microbatch"]], 0)
    columns["microbatch"] = numbers.astype(short_type(ends[-1] - 1))
    if columns["joined"].any():  # a cut leaves no half of a pair, where they are of two microbatches
        columns["joined"] &= np.append((np.diff(row) == 1) & (np.diff(round_of_row) == 0), False)
    if isinstance(table, Program) and table.has_groups:
        # The last group of a round and the first of the next one are two, though they may follow each other.
        group = columns["group"].astype(np.int64)
        columns["group"] = np.where(group > 0, group + round_of_row * (int(group.max()) + 1), 0)
    counts = np.bincount(table.rank_of_row[row], minlength=table.num_ranks)
    return replace(
        table,
        num_microbatches=ends[-1],
        route_of_microbatch=np.concatenate([table.route_of_microbatch[of_round] for of_round in chosen]),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        **columns,
    )
