"""Annealing of choices: a trial is one list schedule, and equal seeds try the same."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.joint.annealing import STUCK_S, Annealing, row_of
from penstock.searching.joint.splits import Splits
from penstock.searching.listing import list_schedule
from penstock.searching.moves import MEAN_END_WEIGHT
from penstock.searching.sequences import run
from penstock.searching.settings import ANY_NUMBER
from tests.searching.joint.test_splits import layers


def annealed(seed=0, limit=None, *, placement=None, may_recompute=False, num_trials=400, recomputed=()):
    placement = placement or Placement.vee(2)
    splits = Splits(layers(3), placement, 5, None if limit is None else np.full(2, limit, np.int64))
    annealing = Annealing(splits, seed=seed, may_recompute=may_recompute)
    rest = 9 - placement.num_stages + 1
    split = (rest, *[1] * (placement.num_stages - 1))
    row = row_of(split, recomputed, 2, np.full(placement.num_stages, ANY_NUMBER), wait=2)
    return splits, row, annealing.run(row, num_trials, 0.5)


@pytest.mark.parametrize("limit", [None, 700])
@pytest.mark.parametrize(
    "placement", [Placement.line(2), Placement.vee(2), Placement.loop(2, 6)], ids=lambda p: p.style
)
def test_the_best_choice_takes_as_long_as_the_loop_has_said(placement, limit):
    splits, _, choice = annealed(limit=limit, placement=placement, may_recompute=limit is not None)

    problem = splits.problem_of(choice.split, choice.recomputed)
    sequence = list_schedule(problem, choice.setting)
    timed = run(problem, sequence)

    assert sum(choice.split) == 9
    assert timed.fits(problem)
    ends = [timed.end_s[problem.rank == rank].max() for rank in range(2)]
    assert choice.cost_s == pytest.approx(timed.makespan_s + MEAN_END_WEIGHT * np.mean(ends), rel=1e-12)


def test_more_trials_find_shorter_orders_and_another_split():
    _, row, first = annealed(num_trials=1)
    _, _, best = annealed(num_trials=2000)

    assert first.row.tolist() == row.tolist()
    assert best.cost_s < 0.8 * first.cost_s
    assert max(best.split) < max(first.split)


def test_equal_seeds_find_the_same():
    rows = [annealed(seed, num_trials=300)[2].row.tolist() for seed in (1, 1, 2)]

    assert rows[0] == rows[1] != rows[2]


def test_stages_recompute_only_where_they_may_and_memory_asks_for_it():
    _, _, kept = annealed(limit=400)
    splits, _, recomputed = annealed(limit=400, may_recompute=True, num_trials=2000)

    assert kept.recomputed == ()
    assert recomputed.recomputed
    assert recomputed.cost_s < kept.cost_s
    assert splits.problem_of(recomputed.split, recomputed.recomputed).recomputed_stages == recomputed.recomputed


def test_where_nothing_fits_a_choice_costs_more_than_any_order():
    _, _, choice = annealed(limit=60)

    assert choice.cost_s >= STUCK_S
