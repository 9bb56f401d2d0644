"""Sweeps on a line: the eight schedules of the zero-bubble scheduler."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.sequences import run, sequence_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.searching.sweeps.line import line_sweeps
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs, rows, searched_case


def test_what_the_zero_bubble_scheduler_found_is_found():
    """302 of its results, to the bit: the best of all settings is as short as the best of theirs."""
    found = {}
    recorded = [row for row in rows("searched_zero_bubble.json") if row["name"].startswith("zb/")]
    for row in recorded:
        problem = problem_of(*searched_case(row))
        runs = [run(problem, sequence) for sequence in line_sweeps(problem) if sequence is not None]
        assert all(each.fits(problem) for each in runs)
        best_s = min(each.span_s for each in runs)
        if abs(best_s - row["span"]) > 1e-9 * row["span"]:
            found[row["name"]] = best_s, row["span"]

    assert len(recorded) == 302
    assert found == {}


@pytest.mark.parametrize("seed", range(4))
def test_sequences_can_run_and_fit_where_stages_are_uneven(seed):
    costs = random_costs(seed, 6, is_exclusive=seed % 2 == 0)
    problem = problem_of(Placement.line(6), 16, costs, 70 + 20 * seed)

    found = [sequence for sequence in sequences_of_sweeps(problem) if sequence is not None]

    assert found
    for sequence in found:
        assert sorted(sequence.tolist()) == list(range(problem.num_actions))
        again = sequence_of(problem.schedule(sequence, "again"))  # refuses what cannot run
        assert run(problem, sequence).fits(problem)
        assert run(problem, again).makespan_s == pytest.approx(run(problem, sequence).makespan_s) or seed % 2 == 0


def test_ranks_run_fewer_forwards_ahead_than_those_before_them():
    problem = problem_of(Placement.line(4), 12, Costs.uniform(activation_bytes=10, weight_context_bytes=5), 70)

    first, *_ = line_sweeps(problem)

    ahead = []
    for rank in range(4):
        own = first[problem.rank[first] == rank]
        ahead.append(int(np.flatnonzero(own >= 4 * 12)[0]))
    assert ahead == sorted(ahead, reverse=True)
    assert len(set(ahead)) == 4


def test_without_room_for_one_microbatch_there_is_none():
    problem = problem_of(Placement.line(3), 4, Costs.uniform(activation_bytes=10), 9)

    assert list(line_sweeps(problem)) == [None] * 8
