"""The split of weighted layers into consecutive parts whose heaviest part is as light as possible."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PartitionError

Table = NDArray[np.float64]

# Sums of measured weights differ in their last bits with the order of addition; such parts weigh the same.
TOLERANCE = 1e-9


def balance(weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Return how many consecutive weights each part takes, so that the largest sum of a part is smallest.

    Of all such splits, the one with the most even counts is taken (least sum of squares); then the one whose first
    parts are longer. No part is empty. Takes O(num_parts x len(weights)²) steps, in numpy.

    Raises:
        PartitionError: fewer than one part, more parts than weights, or a weight that is negative or not finite.
    """
    _check(weights, num_parts)
    ends = np.arange(len(weights) + 1)
    counts = ends[None, :] - ends[:, None]  # [start, end]
    values = np.asarray(weights, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values / (values.max() or 1.0))])  # relative, so that no sum is infinite
    part_weights = np.where(counts > 0, sums[None, :] - sums[:, None], np.inf)
    lightest = _best_rests(part_weights, np.maximum, num_parts)[-1][0]
    squares = np.where(part_weights <= lightest * (1 + TOLERANCE), counts.astype(np.float64) ** 2, np.inf)
    return _read_back(squares, _best_rests(squares, np.add, num_parts))


def _best_rests(cost: Table, combine: Callable[[Table, Table], Table], num_parts: int) -> list[Table]:
    """Return, for 1, 2, ... parts, the least cost of splitting everything from each start into so many parts."""
    rests = [cost[:, -1]]
    for _ in range(num_parts - 1):
        rests.append(combine(cost, rests[-1][None, :]).min(axis=1))
    return rests


def _read_back(cost: Table, rests: list[Table]) -> tuple[int, ...]:
    """Walk from the first start along the best rests, always to the furthest end that is still best."""
    sizes = []
    start = 0
    for rest in reversed(rests[:-1]):
        totals = cost[start] + rest
        end = int(np.flatnonzero(totals == totals.min())[-1])
        sizes.append(end - start)
        start = end
    return (*sizes, len(cost) - 1 - start)


def _check(weights: Sequence[float], num_parts: int) -> None:
    if num_parts < 1:
        raise PartitionError(f"{num_parts} parts were asked for; expected 1 or more")
    if num_parts > len(weights):
        raise PartitionError(
            f"{num_parts} parts were asked for, but there are {len(weights)} weights and no part may be empty; "
            f"use at most {len(weights)} parts"
        )
    for position, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise PartitionError(f"weight {position} is {weight}; expected a finite number, 0 or larger")
