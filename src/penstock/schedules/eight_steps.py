"""The eight steps of DualPipe, which are also those of DualPipeV: one rank between its near and its far stage.

Both fold a pipeline of 2d stages in the middle, so that a rank holds two: microbatches reach the near one first (0) and
come back to the far one (1). A rank with `outer` ranks between it and the fold, and inner = d - outer, runs

    1  2 outer x  F0                       until the first microbatch comes back
    2  inner x    F0 F1
    3  outer x    I1 W F1                  weight parts fill the wait
    4  n - 2d + inner x (F0;B1) (F1;B0)    the steady state; at the fold the first F0 and B1 are not overlapped
    5  outer x    B1 (F1;B0)               no new microbatches
    6  inner x    B1 B0                    the later half of them I, whose weight parts wait
    7  outer x    W I0
    8  inner x    W

for n microbatches through each of its stages. A W is always that of the oldest I without one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.schedules.family import Shape
from penstock.schedules.options import Choice, Options

OVERLAP = Choice("true", ("true", "false"), "run F and B of a pair together, as one overlapped pair, or F before B")
NEAR, FAR = 0, 1
_Rows = NDArray[np.int32]
"""[num_rows, 3] kind, side, and whether the row begins an overlapped pair."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two stages of a rank, and the first of the microbatches that run through it."""

    stage: int
    first_microbatch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The actions of one rank."""

    rows: NDArray[np.int32]
    """[num_rows, 3] kind, stage and microbatch."""
    joined: NDArray[np.bool_]

    def as_asked(self, shape: Shape, options: Options) -> "RankOrder":
        """Leave out the backwards or the pairs, where the shape or the option `overlap` says so."""
        if shape.is_forward_only:
            rows = self.rows[self.rows[:, 0] == Kind.FORWARD]
            return RankOrder(rows, np.zeros(len(rows), np.bool_))
        return self if options.is_on("overlap") else RankOrder(self.rows, np.zeros_like(self.joined))


def eight_steps(near: Side, far: Side, *, outer: int, inner: int, num_microbatches: int) -> RankOrder:
    """Order one rank; at least 2 (outer + inner) microbatches must run through each stage."""
    num_steady = num_microbatches - 2 * (outer + inner) + inner
    steps = [
        _repeat(2 * outer, (Kind.FORWARD, NEAR)),
        _repeat(inner, (Kind.FORWARD, NEAR), (Kind.FORWARD, FAR)),
        _repeat(outer, (Kind.BACKWARD_INPUT, FAR), (Kind.BACKWARD_WEIGHT, FAR), (Kind.FORWARD, FAR)),
        _repeat(num_steady, *_pair(NEAR, FAR), *_pair(FAR, NEAR)),
        _repeat(outer, (Kind.BACKWARD, FAR), *_pair(FAR, NEAR)),
        _repeat(inner, (Kind.BACKWARD, FAR), (Kind.BACKWARD, NEAR)),
        _repeat(outer, (Kind.BACKWARD_WEIGHT, NEAR), (Kind.BACKWARD_INPUT, NEAR)),
        _repeat(inner, (Kind.BACKWARD_WEIGHT, NEAR)),
    ]
    if outer == 0:
        steps[3][0, 2] = False
    steps[5][inner:, 0] = Kind.BACKWARD_INPUT
    rows = np.concatenate(steps)
    return RankOrder(_number(rows, near, far), rows[:, 2].astype(np.bool_))


def _pair(forward: int, backward: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (Kind.FORWARD, forward, True), (Kind.BACKWARD, backward)


def _repeat(count: int, *pattern: tuple[int, ...]) -> _Rows:
    rows = [(*row, False)[:3] for row in pattern]
    return np.tile(np.array(rows, np.int32), (count, 1))


def _number(rows: _Rows, near: Side, far: Side) -> NDArray[np.int32]:
    """Give forwards and backwards of each side their microbatches in ascending order, and each W its I."""
    kind, side = rows[:, 0], rows[:, 1]
    order = np.empty_like(rows)
    order[:, 0] = kind
    is_forward, is_weight = kind == Kind.FORWARD, kind == Kind.BACKWARD_WEIGHT
    for index, end in ((NEAR, near), (FAR, far)):
        for chosen in (is_forward, ~is_forward & ~is_weight):
            here = np.flatnonzero(chosen & (side == index))
            order[here, 1] = end.stage
            order[here, 2] = end.first_microbatch + np.arange(len(here))
    order[is_weight, 1:] = order[kind == Kind.BACKWARD_INPUT, 1:]
    return order
