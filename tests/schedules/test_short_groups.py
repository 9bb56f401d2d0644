"""Short groups: when they come to their next stages."""

from penstock.schedules.short_groups import first_visits


def test_no_two_stages_are_visited_at_once():
    for num_local_stages in range(1, 9):
        for rounds in range(1, 9):
            visits = first_visits(num_local_stages, rounds)

            assert sorted(visit % num_local_stages for visit in visits) == list(range(num_local_stages))
