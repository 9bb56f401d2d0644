"""Seconds in ticks: nothing is lost where one number divides all of them; elsewhere a bound in ticks stays below."""

from fractions import Fraction

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.ticks import MOST_TICKS, TIMES, Ticks
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs


def ticks_of(costs, ranks=2, microbatches=3):
    return Ticks.of(problem_of(Placement.line(ranks), microbatches, costs))


@pytest.mark.parametrize(
    ("costs", "tick_s", "counted"),
    [
        (Costs.uniform(forward=1, backward_input=2, backward_weight=3), 1, (1, 2, 3)),
        (Costs.uniform(forward=4, backward_input=2, backward_weight=6), 2, (2, 1, 3)),
        (Costs.uniform(forward=0.1, backward_input=0.3, backward_weight=0.7), Fraction(1, 10), (1, 3, 7)),
        (Costs.uniform(forward=0.1 + 0.2, backward_input=0.3, backward_weight=0.1 * 3), Fraction(3, 10), (1, 1, 1)),
        (Costs.uniform(forward=1 / 3, backward_input=0.5, backward_weight=0), Fraction(1, 6), (2, 3, 0)),
        (Costs.uniform(forward=1.5e-6, backward_input=2e-6, backward_weight=1e-6), Fraction(1, 2 * 10**6), (3, 4, 2)),
    ],
)
def test_a_tick_is_the_largest_number_of_which_all_seconds_are_multiples(costs, tick_s, counted):
    ticks = ticks_of(costs)

    assert ticks.tick_s == tick_s
    assert [ticks.problem.plane(ticks.problem.seconds, plane)[0, 0] for plane in range(3)] == list(counted)
    assert ticks.bound_s(12, by_span=True) == pytest.approx(float(12 * tick_s), rel=1e-13)


def test_a_bound_in_whole_seconds_is_not_rounded_and_has_no_launch_at_its_begin():
    assert ticks_of(Costs.uniform()).bound_s(27, by_span=True) == 27.0
    ticks = ticks_of(Costs.uniform(launch_s=0.5))
    assert ticks.bound_s(18, by_span=False) == 18 * 1.5 - 0.5
    assert ticks.bound_s(0, by_span=False) == 0.0


@pytest.mark.parametrize(
    "costs",
    [
        random_costs(0, 2),
        Costs.uniform(forward=np.pi, backward_input=1e-7, backward_weight=1e4),
        Costs.uniform(forward=1e-6 * np.sqrt(2), backward_input=1e-6, backward_weight=3e-6),
        Costs.uniform(forward=1 + 1e-12, backward_input=1, backward_weight=1),
    ],
)
def test_other_seconds_are_cut_off_by_less_than_one_of_many_ticks(costs):
    problem = problem_of(Placement.line(2), 3, costs)

    ticks = Ticks.of(problem)

    for name in TIMES:
        counted = [int(each) * ticks.tick_s for each in getattr(ticks.problem, name)]
        exact = [Fraction(each) for each in getattr(problem, name)]
        assert all(0 <= one - other < ticks.tick_s for one, other in zip(exact, counted, strict=True))
    assert MOST_TICKS / 4 < ticks.total <= MOST_TICKS
    assert ticks.bound_s(1006, by_span=True) == ticks.bound_s(1000, by_span=False)  # 2 stages
