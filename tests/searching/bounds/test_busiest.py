"""Bounds by the work of a rank, recomputed from the formulas that are printed for a line."""

import pytest

from penstock.placement import Placement
from penstock.searching.bounds import Route, lower_bound
from penstock.searching.bounds.busiest import of_slowest_microbatch
from penstock.simulation import Costs
from tests.searching.cases import problem_of


@pytest.mark.parametrize(("p", "m", "c"), [(2, 4, 0.0), (4, 8, 0.25), (8, 16, 1.0)])
def test_on_a_line_without_a_limit_the_bound_is_the_one_that_is_published(p, m, c):
    f, i, w = 3.0, 2.0, 1.0
    costs = Costs.uniform(forward=f, backward_input=i, backward_weight=w, transfer=c)

    found = lower_bound(problem_of(Placement.line(p), m, costs))

    published = max((p - 1) * (f + c) + m * (f + i + w), (p - 1) * (f + i + 2 * c) + m * (f + i) + w)
    assert found.seconds == pytest.approx(published, rel=1e-12)


def test_a_step_takes_at_least_as_long_as_its_slowest_microbatch_alone():
    costs = Costs(
        forward_s=(1.0, 5.0),
        backward_input_s=(2.0,),
        backward_weight_s=(3.0, 1.0),
        latency_s=0.5,
        microbatch_compute_factor=(1.0, 10.0, 2.0),
    )
    (found,) = of_slowest_microbatch(Route(problem_of(Placement.line(2), 3, costs)))

    assert str(found) == "microbatch 1 of rank 0: F and I 100 s + W 30 s + ways 1 s"
    assert lower_bound(problem_of(Placement.line(2), 3, costs), by_span=True) == found
