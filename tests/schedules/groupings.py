"""Shapes of interleaved schedules, over which the formulas of their pages are compared with simulated timelines."""

from dataclasses import dataclass
from itertools import product

from tests.schedules.timing import timeline

PARTS = (3, 4, 2)
"""Seconds of a forward, an input gradient and a weight gradient."""

SHAPES = [(2, 2, 4), (2, 3, 5), (3, 2, 7), (4, 1, 6), (4, 2, 8), (4, 3, 9)]
"""Ranks, stages per rank, microbatches."""


@dataclass(frozen=True)
class Grouping:
    """p ranks, m microbatches, v stages per rank and groups of g, as the pages call them."""

    p: int
    m: int
    v: int
    g: int

    @property
    def fills_all_groups(self):
        """Whether every group, also the last, has a microbatch for each rank."""
        return min(self.g, self.m) >= self.p and (self.m % self.g == 0 or self.m < self.g or self.m % self.g >= self.p)

    def timeline(self, name):
        return timeline(name, self.p, self.m, PARTS, stages_per_rank=self.v, group_size=self.g)

    def bubble(self, found):
        """Idle time of a timeline by makespan."""
        return found.makespan_s - self.m * self.v * sum(PARTS)


def group_of_torch(ranks, microbatches):
    """As few groups as there can be with a microbatch for each rank, the last one no larger."""
    return -(-microbatches // max(1, microbatches // ranks))


def groupings():
    """Groupings with short, full, ragged and too large groups, and with fewer microbatches than ranks."""
    sizes = product(range(1, 6), range(1, 9), (1, 3))
    return [Grouping(p, m, v, g) for p, m, v in sizes for g in sorted({1, -(-p // 2), p - 1, p, p + 1, m, m + 2} - {0})]


def assert_formulas_hold(name, idle_s, held):
    """Each rank but one adds `idle_s` to the bubble, and rank s holds `held(p, v, g, s)`, where the pages say so."""
    for shape in groupings():
        p, m, v, g = shape.p, shape.m, shape.v, shape.g
        found = shape.timeline(name)
        bubble, peaks = shape.bubble(found), found.peak_activations
        most = [min(v * m, held(p, v, g, s)) for s in range(p)]

        assert bubble >= (p - 1) * idle_s, shape
        assert (bubble == (p - 1) * idle_s) >= shape.fills_all_groups, shape
        if g >= p / 2:
            assert all(map(int.__le__, peaks, most)), shape
            assert (peaks == most) >= (g <= m and p <= m), shape
