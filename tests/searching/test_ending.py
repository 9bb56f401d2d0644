"""The end of a search: what fits with its messages, and which of several is chosen."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.proofs import check
from penstock.searching.candidates import Candidate, of_constructions, of_families
from penstock.searching.ending import finalists_of, shortest, steadiest
from penstock.searching.noise import mean_s, perturbed
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs

COSTS = random_costs(3, 4)
PROBLEM = problem_of(Placement.line(4), 8, COSTS)
ALL = [
    *of_families(PROBLEM, by_span=False),
    *of_constructions(PROBLEM, by_span=False, is_over=lambda: False),
]


def test_what_breaks_the_limit_with_its_messages_is_left_out():
    found = finalists_of(ALL, COSTS, 60, by_span=False)

    assert 0 < len(found) < len(ALL)
    for each in found:
        check(each.plan.program, memory_limit=60, costs=COSTS)
    fit_without = [each for each in ALL if Candidate.of(_within(60), each.sequence, "list", by_span=False).fits]
    assert len(found) < len(fit_without)


def test_of_equally_short_ones_the_one_that_holds_least_is_chosen():
    costs = Costs.uniform(activation_bytes=10, weight_context_bytes=5)
    families = [*of_families(problem_of(Placement.line(4), 8, costs), by_span=False)]
    found = finalists_of(families, costs, None, by_span=False)

    best = shortest(found)

    equal = [each for each in found if each.objective_s == best.objective_s]
    assert len({each.peak for each in equal}) > 1
    assert best.peak == min(each.peak for each in equal)


def test_the_objective_is_the_one_that_was_asked_for():
    found = finalists_of(ALL, COSTS, None, by_span=True)

    assert [each.objective_s for each in found] == [each.plan.timeline.span_s for each in found]


def test_under_noise_the_best_mean_is_chosen_and_compared_with_the_best_family():
    found, shares = finalists_of(ALL, COSTS, None, by_span=False), np.full((3, 4), 0.1)

    best, noise = steadiest(found, shares, 1, by_span=False)

    draws = perturbed(PROBLEM, shares, 1)
    means = {
        id(each): each.objective_s
        * mean_s(draws, each.candidate.sequence, by_span=False)
        / mean_s([PROBLEM], each.candidate.sequence, by_span=False)
        for each in found
    }
    families = [each for each in found if each.candidate.family is not None]
    family = min(families, key=lambda each: each.objective_s)
    assert means[id(best)] == min(means.values()) == noise.mean_s
    assert noise.family == family.plan.schedule.name
    assert noise.family_s == family.objective_s
    assert noise.family_mean_s == pytest.approx(means[id(family)])
    assert best is not shortest(found)


def test_where_no_family_fits_there_is_none_to_compare_with():
    found = [each for each in finalists_of(ALL, COSTS, None, by_span=False) if each.candidate.family is None]

    _, noise = steadiest(found, np.full((3, 4), 0.1), 1, by_span=False)

    assert (noise.family, noise.family_s, noise.family_mean_s) == ("", 0.0, 0.0)


def _within(limit):
    return replace(PROBLEM, limit=np.full(4, limit, np.int64))
