"""Blocks that are too narrow to be seen, merged: how much of each column of time every rank spends on what.

    blocks    F F B F B F B F B ....B ..B      too many to draw
    columns   |     |     |     |     |        shares of a column's time, stacked by kind and stage:
    shares     F 2/3 F 1/3 F 1/3 ..             what a column does not fill is a bubble

The steady state of a schedule repeats with every microbatch. A column spans whole periods, so that equal work gives
equal columns instead of a moiré.
"""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from penstock.ir.operations import KIND_INDEX, Kind
from penstock.ir.timeline import Timeline
from penstock.show.layout import Blocks, blocks_of_rank, num_shades

Floats = NDArray[np.float64]
MAX_LANES = 64
"""The most lanes of a picture; more ranks than that share lanes."""


def lanes_of_ranks(num_ranks: int, max_lanes: int = MAX_LANES) -> list[range]:
    """Return the ranks that share each lane: as few as needed, neighbours together."""
    per_lane = ceil(num_ranks / max_lanes)
    return [range(first, min(first + per_lane, num_ranks)) for first in range(0, num_ranks, per_lane)]


def column_edges(end_s: float, period_s: float, max_columns: int) -> Floats:
    """Return columns of whole periods from 0 on, at most so many; the last one may end after the end."""
    if end_s <= 0:
        return np.array([0.0, 1.0])
    if not 0 < period_s < end_s:
        return np.linspace(0.0, end_s, max_columns + 1, dtype=np.float64)
    width_s = period_s * ceil(end_s / (period_s * max_columns) - 1e-9)
    return width_s * np.arange(ceil(end_s / width_s - 1e-9) + 1, dtype=np.float64)


def density_of(timeline: Timeline, edges_s: Floats, lanes: list[range]) -> Floats:
    """Return [num_lanes, num_columns, num_categories] shares of a column's time; a category is a kind and a shade.

    `edges_s` are where columns begin and end. Ranks of one lane are averaged.
    """
    shades = num_shades(timeline.program)
    share = np.zeros((len(lanes), len(edges_s) - 1, len(Kind) * shades))
    for lane, ranks in enumerate(lanes):
        for rank in ranks:
            blocks = blocks_of_rank(timeline, rank)
            category = KIND_INDEX[blocks.kind] * shades + blocks.shade
            for index in np.unique(category).tolist():
                share[lane, :, index] += _busy_s(blocks, category == index, edges_s)
        share[lane] /= len(ranks)
    return share / np.diff(edges_s)[:, None]


def _busy_s(blocks: Blocks, chosen: NDArray[np.bool_], edges_s: Floats) -> Floats:
    """Return [num_columns] seconds of the chosen blocks in each column; a block of half a lane counts half."""
    start_s, end_s = blocks.start_s[chosen], blocks.end_s[chosen]
    work_s = (end_s - start_s) * (blocks.high - blocks.low)[chosen]
    # The work done until each time rises inside blocks and is level between them.
    times_s = np.maximum.accumulate(np.column_stack([start_s, end_s]).ravel())
    work_until_s = np.concatenate([[0.0], np.cumsum(work_s)])
    levels = np.column_stack([work_until_s[:-1], work_until_s[1:]]).ravel()
    return np.diff(np.interp(edges_s, times_s, levels))


def rasterise(share: Floats, height: int) -> NDArray[np.int64]:
    """Return [num_lanes, height, num_columns] the category of every pixel, from the top; -1 for a bubble.

    Shares are stacked from the bottom of the lane.
    """
    tops = np.cumsum(share, axis=2)  # [num_lanes, num_columns, num_categories]
    level = (height - 0.5 - np.arange(height)) / height
    below = tops[:, None, :, :] <= level[None, :, None, None] + 1e-9
    category = below.sum(axis=3)
    return np.where(category == share.shape[2], -1, category).astype(np.int64)
