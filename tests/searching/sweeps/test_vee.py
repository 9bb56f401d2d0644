"""Sweeps on a V: the schedules of ZB-V."""

import pytest

from penstock.placement import Placement
from penstock.searching.sequences import run, sequence_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.searching.sweeps.vee import vee_sweeps
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs, rows, searched_case

FEWER_THAN_RANKS = {
    "zbv/p3/m2/default/mem3p",
    "zbv/p3/m2/unit/mem2p",
    "zbv/p4/m2/default/mem3p",
    "zbv/p4/m2/unit/mem2p",
}
"""With fewer microbatches than ranks a sweep may find no way; list schedules do."""


def test_what_the_scheduler_of_zb_v_found_is_found():
    """60 of its results, to the bit."""
    found = {}
    recorded = [row for row in rows("searched_zero_bubble.json") if row["name"].startswith("zbv/")]
    for row in recorded:
        problem = problem_of(*searched_case(row))
        runs = [run(problem, sequence) for sequence in vee_sweeps(problem) if sequence is not None]
        assert all(each.fits(problem) for each in runs)
        best_s = min((each.span_s for each in runs), default=0.0)
        if abs(best_s - row["span"]) > 1e-9 * row["span"]:
            found[row["name"]] = best_s, row["span"]

    assert len(recorded) == 64
    assert set(found) == FEWER_THAN_RANKS


@pytest.mark.parametrize("seed", range(4))
def test_sequences_can_run_and_fit_where_stages_are_uneven(seed):
    problem = problem_of(Placement.vee(4), 12, random_costs(seed, 8), 110 + 20 * seed)

    found = [sequence for sequence in sequences_of_sweeps(problem) if sequence is not None]

    assert found
    for sequence in found:
        assert sorted(sequence.tolist()) == list(range(problem.num_actions))
        sequence_of(problem.schedule(sequence, "again"))  # refuses what cannot run
        assert run(problem, sequence).fits(problem)


def test_each_setting_runs_again_while_ranks_idle_less():
    problem = problem_of(Placement.vee(8), 16, Costs.uniform(transfer=0.001))

    assert len(list(vee_sweeps(problem))) >= 8


def test_with_little_memory_there_is_none():
    problem = problem_of(Placement.vee(3), 4, Costs.uniform(activation_bytes=10), 15)

    assert list(vee_sweeps(problem)) == [None] * 4
