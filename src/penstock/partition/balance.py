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
    split = lightest_split([weights_of_parts(weights)] * num_parts)
    assert split is not None, "each part may take any weights"
    return split


def weights_of_parts(weights: Sequence[float]) -> Table:
    """[start, end] weight of the part that takes the weights of this range, relative to the largest single one."""
    values = np.asarray(weights, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values / (values.max() or 1.0))])  # relative, so that no sum is infinite
    return np.asarray(sums[None, :] - sums[:, None])


def lightest_split(tables: Sequence[Table]) -> tuple[int, ...] | None:
    """Return how many consecutive weights each part takes, so that the largest entry of a part is smallest.

    `tables` are [start, end] for each part; infinite where the part may not take this range. Ties are broken as by
    `balance`. None where the parts cannot take all weights between them.
    """
    bounds = np.arange(len(tables[0]))
    counts = bounds[None, :] - bounds[:, None]  # [start, end]
    costs = [np.where(counts > 0, table, np.inf) for table in tables]
    lightest = _best_rests(costs, np.maximum)[-1][0]
    if lightest == np.inf:
        return None
    # Among the splits whose parts are no heavier than that, the one with the least sum of squares of counts.
    evenness = counts.astype(np.float64) ** 2
    squares = [np.where(cost <= lightest * (1 + TOLERANCE), evenness, np.inf) for cost in costs]
    return _read_back(squares, _best_rests(squares, np.add))


def _best_rests(costs: Sequence[Table], combine: Callable[[Table, Table], Table]) -> list[Table]:
    """Return, for the last 1, 2, ... parts, [start] the least cost of splitting all weights from a start into them."""
    rests = [costs[-1][:, -1]]
    for table in reversed(costs[:-1]):
        rests.append(combine(table, rests[-1][None, :]).min(axis=1))
    return rests


def _read_back(costs: Sequence[Table], rests: list[Table]) -> tuple[int, ...]:
    """Walk from the first start along the best rests, always to the furthest end that is still best."""
    sizes = []
    start = 0
    for cost, rest in zip(costs, reversed(rests[:-1]), strict=False):
        totals = cost[start] + rest
        end = int(np.flatnonzero(totals == totals.min())[-1])
        sizes.append(end - start)
        start = end
    return (*sizes, len(costs[0]) - 1 - start)


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
