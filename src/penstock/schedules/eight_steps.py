"""The eight steps of DualPipe, which are also those of DualPipeV: one rank between its near and its far stage.

Both fold a pipeline of 2d stages in the middle, so that a rank holds two: microbatches reach the near one first (0) and
come back to the far one (1). A rank with `outer` ranks between it and the fold, and inner = d - outer, runs

    1  2 outer x  F0                       until the first microbatch comes back
    2  inner x    F0 F1
    3  outer x    I1 W F1                  weight gradients fill the wait
    4  n - 2d + inner x (F0;B1) (F1;B0)    the steady state; at the fold the first F0 and B1 are not overlapped
    5  outer x    B1 (F1;B0)               no new microbatches
    6  inner x    B1 B0                    the later half of them I, whose weight gradients wait
    7  outer x    W I0
    8  inner x    W

for n microbatches through each of its stages. A W is always that of the oldest I without one.
"""

from penstock.errors import ConfigError
from penstock.schedules.options import Choice, Options
from penstock.schedules.phases import RankOrder, b, f, i, pair, phases, repeat, w

OVERLAP = Choice("true", ("true", "false"), "run F and B of a pair together, as one overlapped pair, or F before B")


Side = tuple[int, int]
"""One of the two stages of a rank, and the first of the microbatches that run through it."""


def eight_steps(sides: tuple[Side, Side], outer: int, inner: int, microbatches: int, options: Options) -> RankOrder:
    """Order one rank by its near and its far side; 2 (outer + inner) microbatches or more must run through each."""
    (f0, b0, i0), (f1, b1, i1) = ([action(stage, first=first) for action in (f, b, i)] for stage, first in sides)
    steady = microbatches - 2 * (outer + inner) + inner
    at_fold = int(outer == 0)
    together = pair if options.is_on("overlap") else lambda first, second: (first, second)
    return phases(
        repeat(2 * outer, f0),  # 1
        repeat(inner, f0, f1),  # 2
        repeat(outer, i1, w(), f1),  # 3
        repeat(at_fold, f0, b1, together(f1, b0)),  # 4
        repeat(steady - at_fold, together(f0, b1), together(f1, b0)),
        repeat(outer, b1, together(f1, b0)),  # 5
        repeat(inner // 2, b1, b0),  # 6
        repeat(inner % 2, b1, i0),
        repeat(inner // 2, i1, i0),
        repeat(outer, w(), i0),  # 7
        repeat(inner, w()),  # 8
    )


def require_two_per_rank(name: str, num_microbatches: int, num_ranks: int, instead: str) -> None:
    """Refuse fewer microbatches than two per rank. Raises: ConfigError, which names a family to take instead."""
    if num_microbatches < 2 * num_ranks:
        raise ConfigError(
            f"{name} needs at least 2 microbatches per rank, got {num_microbatches} on {num_ranks} ranks; "
            f"use {2 * num_ranks} or more, or {instead}, which takes fewer",
            key="microbatches",
        )
