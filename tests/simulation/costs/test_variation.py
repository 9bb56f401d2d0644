"""How far apart equal computations are."""

import numpy as np
import pytest

from penstock.ir.action import Kind
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.costs import Spread
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.simulation.costs.variation import Variation, largest_variation

F, B = Kind.FORWARD, Kind.BACKWARD


def noisy(amount, *, stage=None, seed=0):
    """Recorded steps of 4 stages whose computations are up to a share longer, on one stage or on all."""
    program = lower(build("1f1b", ranks=4, microbatches=8))
    played, chance = simulate(program, Costs.uniform(forward=1.0, backward=2.0)), np.random.default_rng(seed)
    is_noisy = program.is_compute & (program.stage == stage if stage is not None else True)
    steps = []
    for _ in range(5):
        factors = 1 + amount * chance.uniform(0, 1, len(program.op)) * is_noisy
        end_s = played.start_s + (played.end_s - played.start_s) * factors
        steps.append(Timeline(program, "measured", played.start_s, end_s))
    return costs_from_timelines(steps).spreads


SEVERAL = (Spread(F, 0, 1.0, 0.5), Spread(B, 0, 3.0, 0.3), Spread(F, 1, 2.0, 0.2))
TINY = (Spread(F, 0, 1e-6, 1e-6), Spread(F, 1, 1.0, 0.05))


@pytest.mark.parametrize(
    ("spreads", "expected"),
    [(SEVERAL, Variation(0, pytest.approx(0.2))), (TINY, Variation(1, pytest.approx(0.05))), ((), None)],
    ids=["several operations", "a stage that takes next to nothing does not count", "measured once"],
)
def test_the_middle_half_is_compared_with_the_median_over_all_operations_of_a_stage(spreads, expected):
    assert largest_variation(spreads) == expected


@pytest.mark.parametrize(("amount", "is_busy"), [(0.1, False), (0.2, False), (0.5, True), (1.0, True)])
def test_a_busy_machine_is_told_from_an_idle_one(amount, is_busy):
    """Of values spread evenly over an interval, the middle half is half as wide."""
    found = largest_variation(noisy(amount))

    assert found.share == pytest.approx(amount / 2 / (1 + amount / 2), rel=0.35)
    assert found.is_busy == is_busy


def test_single_stragglers_do_not_make_a_machine_busy():
    program = lower(build("1f1b", ranks=4, microbatches=8))
    played = simulate(program, Costs.uniform(forward=1.0, backward=2.0))
    end_s = played.end_s.copy()
    end_s[program.compute_rows(1)[3]] += 50.0

    recorded = Timeline(program, "measured", played.start_s, end_s)
    assert largest_variation(costs_from_timelines([recorded]).spreads) is None
