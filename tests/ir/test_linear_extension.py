"""The linear extension: every action after what it needs, ties between ranks broken by rank."""

import numpy as np
from hypothesis import given

from penstock.ir.deps import NONE, predecessors
from penstock.ir.linear_extension import linear_extension, walk_untimed, whole_starts
from penstock.ir.walk import Walk
from tests.proofs.tables import schedule_of
from tests.support.strategies import feasible_schedules


def starts_of(table):
    return whole_starts(walk_untimed(table, predecessors(table)))


def in_order(schedule):
    return [str(schedule.action(row)) for row in linear_extension(starts_of(schedule))]


def test_whole_backwards_take_two_units_and_their_parts_one_each():
    assert starts_of(schedule_of("0F0 0B0 0F1 0B1")).tolist() == [0, 1, 3, 4]
    assert starts_of(schedule_of("0F0 0I0 0W0 0F1 0I1 0W1")).tolist() == [0, 1, 2, 3, 4, 5]


def test_actions_stand_by_start_then_rank():
    schedule = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")

    assert in_order(schedule) == ["0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1"]


def test_the_members_of_a_pair_stand_together_in_their_order():
    schedule = schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")

    assert in_order(schedule) == ["0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"]


def test_starts_take_few_bytes_until_they_are_large():
    small, large = np.array([0.0, 65_535.0]), np.array([0.0, 65_536.0])

    assert whole_starts(Walk(small, small, np.zeros(1, np.int64))).dtype == np.uint16
    assert whole_starts(Walk(large, large, np.zeros(1, np.int64))).tolist() == [0, 65_536]


@given(feasible_schedules())
def test_every_action_stands_behind_what_it_needs_and_in_the_order_of_its_rank(schedule):
    order, place = linear_extension(starts_of(schedule)), np.empty(schedule.num_actions, np.int64)
    place[order] = np.arange(schedule.num_actions)

    before = predecessors(schedule)
    needed = before != NONE
    assert (np.where(needed, place[before], -1) < place[:, None]).all()
    rank = np.searchsorted(schedule.offsets, order, side="right")
    for own in range(1, schedule.num_ranks + 1):
        assert (np.diff(order[rank == own]) > 0).all()
