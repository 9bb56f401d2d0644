"""Sweeps on lines and Vs: they find what the zero-bubble schedulers found, and what they find can run and fits."""

import pytest

from penstock.placement import Placement
from penstock.searching.sequences import run, sequence_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.searching.sweeps.line import line_sweeps
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


@pytest.mark.parametrize(
    ("placement", "has_some"),
    [
        (Placement.line(4), True),
        (Placement.line(1), True),
        (Placement.vee(4), True),
        (Placement.vee(1), False),
        (Placement.loop(2, 4), False),
        (Placement.wave(2, 8), False),
    ],
)
def test_lines_and_vees_have_some(placement, has_some):
    found = [*sequences_of_sweeps(problem_of(placement, 8, Costs.uniform()))]

    assert bool(found) == has_some
    assert all(each is not None for each in found)


@pytest.mark.parametrize(
    ("kind", "sweeps", "number", "not_found"),
    [("zb", line_sweeps, 302, set()), ("zbv", vee_sweeps, 64, FEWER_THAN_RANKS)],
    ids=["line", "v"],
)
def test_what_the_zero_bubble_schedulers_found_is_found(kind, sweeps, number, not_found):
    """Each result to the bit: the best of all settings is as short as the best of theirs."""
    missed = {}
    recorded = [row for row in rows("searched_zero_bubble.json") if row["name"].startswith(f"{kind}/")]
    for row in recorded:
        problem = problem_of(*searched_case(row))
        runs = [run(problem, sequence) for sequence in sweeps(problem) if sequence is not None]
        assert all(each.fits(problem) for each in runs)
        best_s = min((each.span_s for each in runs), default=0.0)
        if abs(best_s - row["span"]) > 1e-9 * row["span"]:
            missed[row["name"]] = best_s, row["span"]

    assert len(recorded) == number
    assert set(missed) == not_found, missed


@pytest.mark.parametrize("is_exclusive", [False, True], ids=["free links", "serialized links"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("placement", "microbatches", "limit"),
    [(Placement.line(6), 16, 70), (Placement.vee(4), 12, 110)],
    ids=["line", "v"],
)
def test_sequences_can_run_and_fit_where_stages_are_uneven(placement, microbatches, limit, seed, is_exclusive):
    costs = random_costs(seed, placement.num_stages, is_exclusive=is_exclusive)
    problem = problem_of(placement, microbatches, costs, limit + 20 * seed)

    found = [sequence for sequence in sequences_of_sweeps(problem) if sequence is not None]

    assert found
    for sequence in found:
        assert sorted(sequence.tolist()) == list(range(problem.num_actions))
        again = sequence_of(problem.schedule(sequence, "again"))  # refuses what cannot run
        assert run(problem, sequence).fits(problem)
        assert run(problem, again).makespan_s == pytest.approx(run(problem, sequence).makespan_s) or is_exclusive


@pytest.mark.parametrize(
    ("sweeps", "placement", "limit", "number"),
    [(line_sweeps, Placement.line(3), 9, 8), (vee_sweeps, Placement.vee(3), 15, 4)],
    ids=["line", "v"],
)
def test_without_room_for_one_microbatch_there_is_none(sweeps, placement, limit, number):
    problem = problem_of(placement, 4, Costs.uniform(activation_bytes=10), limit)

    assert list(sweeps(problem)) == [None] * number
