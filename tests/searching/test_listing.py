"""List schedules can run, keep to the limit, and do what their setting says."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.proofs import check
from penstock.searching.listing import Setting, list_schedule
from penstock.searching.sequences import run
from penstock.searching.settings import ANY_NUMBER, settings_for
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs


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


def test_1f1bs_numbers_give_1f1b():
    problem = problem_of(Placement.line(3), 5, Costs.uniform())
    setting = Setting(np.array([3, 2, 1], np.int32), waits_for_share=1.0)

    schedule = problem.schedule(list_schedule(problem, setting), "list")

    first = [str(schedule.row(row)) for row in range(8)]
    assert first == ["0F0", "0F1", "0F2", "0I0", "0W0", "0F3", "0I1", "0W1"]


def test_the_oldest_microbatch_of_a_v_has_room_to_come_to_its_end():
    """Rank 0 has room for three activations; it keeps one for the way back."""
    placement = Placement.vee(3)
    problem = problem_of(placement, 4, Costs.uniform(activation_bytes=1, weight_context_bytes=1), 3)

    sequence = list_schedule(problem, Setting(np.full(6, ANY_NUMBER, np.int32)))

    assert sequence is not None
    assert run(problem, sequence).peak.max() <= 3


def test_where_nothing_fits_there_is_none():
    problem = problem_of(Placement.line(2), 2, Costs.uniform(activation_bytes=10), 9)

    assert list_schedule(problem, next(settings_for(problem))) is None
