"""List schedules can run, keep to the limit, and do what their setting says."""

import json
from dataclasses import replace

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.proofs import check
from penstock.searching.listing import ListState, Setting, fill_sequence, list_schedule
from penstock.searching.sequences import Columns, Timing, run
from penstock.searching.settings import ANY_NUMBER, settings_for
from penstock.simulation import Costs
from tests.searching.cases import DATA, problem_of, random_costs
from tests.searching.list_cases import NUM_CASES, digest_of


@pytest.mark.parametrize("others", [{}, {"is_exclusive": True}])
@pytest.mark.parametrize(
    "placement",
    [Placement.line(4), Placement.vee(4), Placement.loop(3, 6), Placement.wave(2, 8)],
    ids=lambda own: own.style,
)
def test_every_setting_gives_a_schedule_that_is_proved_under_the_limit(placement, others):
    costs = random_costs(2, placement.num_stages, **others)
    most = 12 * len(placement.stages_of_rank[0]) + 20
    problem = problem_of(placement, 6, costs, most)
    found = 0
    for setting in settings_for(problem):
        sequence = list_schedule(problem, setting)
        if sequence is None:
            continue
        found += 1
        assert run(problem, sequence).fits(problem)
        check(problem.schedule(sequence, "list"))
    assert found > 5


def setting_of(problem, most_under_way, *, prefers_inputs=True, waits_for_share=0.0, deep_first=True):
    of_ranks = (np.full(problem.num_ranks, each) for each in (prefers_inputs, float(waits_for_share), deep_first))
    return Setting(np.array(most_under_way, np.int32), *of_ranks)


def test_a_rank_may_have_a_setting_of_its_own():
    """F and I of rank 0 are both ready at its third action; it takes what its setting says."""
    problem = problem_of(Placement.line(2), 4, Costs.uniform())
    setting = setting_of(problem, [ANY_NUMBER] * 2)
    others = replace(setting, prefers_inputs=np.array([False, True]))

    first, second = (problem.schedule(list_schedule(problem, each), "list") for each in (setting, others))

    def order(schedule, rank):
        return [str(schedule.row(row)) for row in range(*schedule.offsets[rank : rank + 2])]

    assert order(first, 0) != order(second, 0)
    assert order(second, 0)[:4] == ["0F0", "0F1", "0F2", "0F3"]
    assert order(first, 1) == order(second, 1)


def test_1f1bs_numbers_give_1f1b():
    problem = problem_of(Placement.line(3), 5, Costs.uniform())
    setting = setting_of(problem, [3, 2, 1], waits_for_share=1.0)

    schedule = problem.schedule(list_schedule(problem, setting), "list")

    first = [str(schedule.row(row)) for row in range(8)]
    assert first == ["0F0", "0F1", "0F2", "0I0", "0W0", "0F3", "0I1", "0W1"]


def test_the_oldest_microbatch_of_a_v_has_room_to_come_to_its_end():
    """Rank 0 has room for three activations; it keeps one for the way back."""
    placement = Placement.vee(3)
    problem = problem_of(placement, 4, Costs.uniform(activation_bytes=1, weight_context_bytes=1), 3)

    sequence = list_schedule(problem, setting_of(problem, [ANY_NUMBER] * 6))

    assert sequence is not None
    assert run(problem, sequence).peak_bytes.max() <= 3


def test_forwards_leave_a_backward_the_room_for_its_workspace():
    """Three activations of 10 bytes would fit, but then no I could take its 8 bytes, and nothing would go on."""
    costs = Costs.uniform(activation_bytes=10, weight_context_bytes=0, backward_workspace_bytes=8)
    problem = problem_of(Placement.line(1), 4, costs, 30)
    setting = setting_of(problem, [ANY_NUMBER], prefers_inputs=False)

    sequence = list_schedule(problem, setting)

    assert problem.room_bytes[:4].tolist() == [18] * 4
    assert sequence[:3].tolist() == [0, 1, 4]  # F, F, I
    assert run(problem, sequence).peak_bytes.max() == 28
    assert list_schedule(replace(problem, room_bytes=problem.taken_bytes), setting) is None


def test_where_nothing_fits_there_is_none():
    problem = problem_of(Placement.line(2), 2, Costs.uniform(activation_bytes=10), 9)

    assert list_schedule(problem, next(settings_for(problem))) is None


def test_the_flat_loop_gives_the_sequences_of_the_loop_that_asked_again_for_every_action():
    """That loop was plain functions over tuples of columns, 30 times as slow; what it gave was recorded."""
    recorded = json.loads((DATA / "list_schedules.json").read_text())

    assert len(recorded) == NUM_CASES
    assert [seed for seed in range(NUM_CASES) if list(digest_of(seed)) != recorded[seed]] == []


@pytest.mark.parametrize(("share", "is_given_up"), [(0.999, True), (1.0, False)])
def test_a_schedule_is_given_up_once_a_rank_cannot_end_in_time(share, is_given_up):
    """Uncompiled: the loop is plain Python."""
    problem = problem_of(Placement.line(3), 5, random_costs(1, 3))
    setting = setting_of(problem, [3, 2, 1])
    sequence, state = np.full(problem.num_actions, -1, np.int32), ListState.of(problem.placement, setting)
    state.most_s[0] = share * run(problem, list_schedule(problem, setting)).makespan_s * (1 + 1e-12)

    count = fill_sequence(Columns.of(problem), state, Timing.of(problem), sequence)

    assert (count < 0) == is_given_up
    assert (sequence >= 0).all() != is_given_up
