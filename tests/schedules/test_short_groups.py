"""Short groups: when they come to their next stages."""

import pytest

from penstock.schedules.short_groups import first_visits


@pytest.mark.parametrize(
    ("num_local_stages", "rounds", "visits"),
    [(1, 3, [0]), (3, 1, [0, 1, 2]), (2, 2, [0, 3]), (3, 2, [0, 2, 4]), (4, 2, [0, 2, 5, 7]), (2, 3, [0, 3])],
)
def test_a_stage_is_visited_after_the_gap_at_the_first_free_visit(num_local_stages, rounds, visits):
    assert first_visits(num_local_stages, rounds) == visits


def test_no_two_stages_are_visited_at_once():
    for num_local_stages in range(1, 9):
        for rounds in range(1, 9):
            visits = first_visits(num_local_stages, rounds)

            assert sorted(visit % num_local_stages for visit in visits) == list(range(num_local_stages))
