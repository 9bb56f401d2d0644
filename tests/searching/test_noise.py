"""Noise: perturbed costs, measured spreads, and what a candidate takes on average."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.operations import Kind
from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.noise import NUM_DRAWS, QUARTILES, mean_s, perturbed, shares_of
from penstock.searching.problem import INPUT, WEIGHT
from penstock.searching.sequences import run, sequence_of
from penstock.simulation import Costs
from penstock.simulation.costs.costs import Spread
from tests.searching.cases import problem_of, random_costs


def test_one_share_holds_for_all_actions():
    assert shares_of(0.03, Costs.uniform(), 4).tolist() == [[0.03] * 4] * 3


def test_measured_shares_are_those_of_a_kind_and_stage_else_of_the_stage_else_of_all():
    spreads = (Spread(Kind.FORWARD, 0, 2.0, 0.2 * QUARTILES), Spread(Kind.BACKWARD, 0, 4.0, 0.8 * QUARTILES))

    shares = shares_of("measured", Costs(**_seconds(), spreads=spreads), 2)

    np.testing.assert_allclose(shares, [[0.1, 0.15], [0.15, 0.15], [0.15, 0.15]])


def test_perturbed_seconds_differ_by_the_share_and_equal_seeds_draw_the_same():
    problem = problem_of(Placement.line(4), 50, random_costs(0, 4))
    shares = np.array([[0.0] * 4, [0.02] * 4, [0.1] * 4])

    draws = perturbed(problem, shares, seed=5)

    ratio = np.stack([each.seconds / problem.seconds for each in draws])
    for plane, share in ((0, 0.0), (INPUT, 0.02), (WEIGHT, 0.1)):
        own = np.stack([problem.plane(row, plane) for row in ratio])
        assert own.std() == pytest.approx(share, rel=0.1)
        assert own.mean() == pytest.approx(1.0)
    assert len(draws) == NUM_DRAWS
    assert (perturbed(problem, shares, seed=5)[3].seconds == draws[3].seconds).all()
    assert (perturbed(problem, shares, seed=6)[3].seconds != draws[3].seconds).any()


@pytest.mark.parametrize("by_span", [False, True])
def test_the_mean_is_that_of_the_objective(by_span):
    problem = problem_of(Placement.line(3), 6, random_costs(1, 3))
    sequence = sequence_of(build("zb-h1", ranks=3, microbatches=6))
    draws = perturbed(problem, np.full((3, 3), 0.1), seed=0)

    runs = [run(each, sequence) for each in draws]

    expected = sum(each.span_s if by_span else each.makespan_s for each in runs) / NUM_DRAWS
    assert mean_s(draws, sequence, by_span=by_span) == pytest.approx(expected)
    assert mean_s([problem], sequence, by_span=by_span) < expected  # what waits for several waits for the latest


NO_SHARE, NO_SPREADS = "expected a share of an action's seconds", "the costs have no measured spreads; give a share"


@pytest.mark.parametrize(
    ("noise", "told"), [*((noise, NO_SHARE) for noise in (-0.1, 1.0, True, "some", [0.1])), ("measured", NO_SPREADS)]
)
def test_what_is_no_share_is_refused(noise, told):
    with pytest.raises(ConfigError, match=f"noise: .*{told}"):
        shares_of(noise, Costs.uniform(), 2)


def _seconds():
    return {"forward_s": (1.0,), "backward_input_s": (1.0,), "backward_weight_s": (1.0,)}
