"""Shapes of interleaved schedules, over which the formulas of their pages are compared with simulated timelines."""

from dataclasses import dataclass
from itertools import product

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

PARTS = {"forward": 3, "backward_input": 4, "backward_weight": 2}


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

    def timeline(self, name, costs=PARTS):
        shape = {"ranks": self.p, "microbatches": self.m, "stages_per_rank": self.v, "group": self.g}
        return simulate(lower(build(name, **shape)), Costs.uniform(**costs))

    def bubble(self, name):
        """Idle time by makespan."""
        return self.timeline(name).makespan_s - self.m * self.v * sum(PARTS.values())


def groupings():
    """Groupings with short, full, ragged and too large groups, and with fewer microbatches than ranks."""
    sizes = product(range(1, 6), range(1, 9), (1, 3))
    return [Grouping(p, m, v, g) for p, m, v in sizes for g in sorted({1, -(-p // 2), p - 1, p, p + 1, m, m + 2} - {0})]
