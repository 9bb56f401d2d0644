"""Moves keep every sequence one that can run and fits, and find better ones."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from penstock.searching.moves import Moves
from penstock.searching.sequences import run, sequence_of
from tests.searching.cases import problem_of, random_costs


def improved(placement, family, *, seed=0, limit=None, by_span=False, rounds=5, **others):
    costs = random_costs(3, placement.num_stages, **others)
    problem = problem_of(placement, 6, costs, limit)
    schedule = build(family, ranks=placement.num_ranks, microbatches=6, stages=placement.num_stages)
    begin = sequence = best = sequence_of(schedule)
    moves = Moves(problem, seed, by_span=by_span)
    best_s = begin_s = run(problem, begin).objective_s(by_span=by_span)
    for _ in range(rounds):
        found = moves.improve(sequence, best, best_s, 400, 0.3)
        sequence, best, best_s = found.sequence, found.best, float(found.best_s[0])
        for each in (sequence, best):
            assert run(problem, each).fits(problem)
            check(problem.schedule(each, "moved"))
    return problem, begin_s, best, best_s


@pytest.mark.parametrize("by_span", [False, True])
@pytest.mark.parametrize(
    ("placement", "family"),
    [(Placement.line(4), "1f1b"), (Placement.vee(4), "zbv"), (Placement.loop(3, 6), "interleaved-1f1b")],
)
def test_moves_find_shorter_sequences(placement, family, by_span):
    problem, begin_s, best, best_s = improved(placement, family, by_span=by_span)

    found = run(problem, best)
    assert best_s == (found.span_s if by_span else found.makespan_s)
    assert best_s < begin_s


def test_equal_seeds_move_alike():
    one, other, third = (improved(Placement.line(4), "1f1b", seed=seed)[2] for seed in (1, 1, 2))

    assert np.array_equal(one, other)
    assert not np.array_equal(one, third)
