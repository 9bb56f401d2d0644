"""Schedules as tables: rows as values, equality, the forwards alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.support.actions import parse_action
from tests.support.strategies import feasible_schedules

TEXTS = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
ORDERS = [[parse_action(text) for text in texts] for texts in TEXTS]
SCHEDULE = Schedule.from_actions("drawn", Placement.line(2), ORDERS, num_microbatches=2)


@pytest.mark.feature("B18")
def test_a_rank_lists_its_actions_as_values_and_counts_its_rows():
    assert SCHEDULE[0] == ORDERS[0]
    assert SCHEDULE[-1] == ORDERS[1]
    assert list(SCHEDULE) == ORDERS
    assert isinstance(SCHEDULE[0][1], OverlappedPair)
    assert (SCHEDULE.num_ranks, SCHEDULE.num_stages, SCHEDULE.num_actions, len(SCHEDULE)) == (2, 2, 8, 2)
    assert SCHEDULE.rank_of_row[[0, 3, 4, 7]].tolist() == [0, 0, 1, 1]
    assert SCHEDULE.action(1) == Action(Kind.FORWARD, 0, 1)
    assert "ranks=2, stages=2, microbatches=2, actions=8" in repr(SCHEDULE)


@pytest.mark.parametrize("rank", [2, -3])
def test_a_rank_that_does_not_exist_is_an_index_error(rank):
    with pytest.raises(IndexError, match=f"rank {rank} of a schedule for 2 ranks"):
        SCHEDULE[rank]


@given(feasible_schedules())
def test_the_values_of_a_schedule_make_the_same_schedule(schedule):
    again = Schedule.from_actions(
        "again",
        schedule.placement,
        list(schedule),
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
        route_of_microbatch=schedule.route_of_microbatch,
    )

    assert again == schedule


def test_the_name_does_not_count_in_equality_and_everything_else_does():
    line, turned = Placement.line(2), Placement.explicit([0, 1], [[1, 0]])
    plain = [ORDERS[1], [parse_action(str(action).replace("1", "0", 1)) for action in ORDERS[1]]]

    assert Schedule.from_actions("other", line, ORDERS, num_microbatches=2) == SCHEDULE
    assert Schedule.from_actions("drawn", line, ORDERS, num_microbatches=3) != SCHEDULE
    assert Schedule.from_actions("drawn", line, ORDERS, num_microbatches=2, num_slices=2) != SCHEDULE
    assert Schedule.from_actions("drawn", line, plain, num_microbatches=2) != SCHEDULE
    assert Schedule.from_actions("drawn", Placement.explicit([1, 0]), ORDERS, num_microbatches=2) != SCHEDULE
    assert Schedule.from_actions("drawn", turned, ORDERS, num_microbatches=2) != SCHEDULE
    assert SCHEDULE != "drawn"


def routed(routes, *, microbatches=2):
    rows = [np.array([[Kind.FORWARD, 0, 0], [Kind.BACKWARD, 0, 0]])]
    return Schedule.from_arrays(
        "routed", Placement.line(1), rows, num_microbatches=microbatches, route_of_microbatch=routes
    )


@pytest.mark.parametrize("route", [1, -1, 127])
def test_a_microbatch_on_a_route_that_does_not_exist_is_refused(route):
    with pytest.raises(ScheduleError, match=f"routed: microbatch 1 travels route {route}; expected .* below 1"):
        routed([0, route])


@pytest.mark.parametrize("routes", [[0], [0, 0, 0], [[0, 0]], [0.0, 0.0]])
def test_anything_but_one_route_per_microbatch_is_refused(routes):
    with pytest.raises(ScheduleError, match="routed: expected 2 whole numbers in route_of_microbatch, one per micro"):
        routed(routes)


def test_routes_cannot_be_changed_and_the_callers_arrays_stay_its_own():
    routes, joined = np.zeros(1, np.int8), np.zeros(2, np.bool_)
    rows = [np.array([[Kind.FORWARD, 0, 0], [Kind.BACKWARD, 0, 0]])]

    schedule = Schedule.from_arrays(
        "own", Placement.line(1), rows, num_microbatches=1, joined=joined, route_of_microbatch=routes
    )

    routes[0], joined[0] = 1, True
    assert (schedule.route_of_microbatch[0], schedule.joined[0]) == (0, False)
    for table in (schedule, replace(lower(schedule), route_of_microbatch=np.zeros(1, np.int8))):
        with pytest.raises(ValueError, match="read-only"):
            table.route_of_microbatch[0] = 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((-1, 0, 0, 0), "kind -1 .* from 0 to 13"),
        ((4, 0, 0, 0), r"op 4 .* of a kind \(F, B, I, W or R\)"),
        ((257, 0, 0, 0), "kind 257 "),
        ((0, 1, 0, 0), "stage 1 is out of range; expected a number from 0 to 0"),
        ((0, -1, 0, 0), "stage -1 "),
        ((0, 2**31, 0, 0), "stage 2147483648 "),
        ((0, 0, 2**32, 0), "microbatch 4294967296 "),
        ((0, 0, 0, 2**15), "slice 32768 .* from 0 to 0"),
    ],
)
def test_a_number_out_of_range_is_refused(row, told):
    rows = np.array([(0, 0, 0, 0), row])
    with pytest.raises(ScheduleError, match=f"wide, rank 0, position 1: {told}"):
        Schedule.from_arrays("wide", Placement.line(1), [rows], num_microbatches=1)


@pytest.mark.parametrize("counts", [{"num_microbatches": 0}, {"num_microbatches": 1, "num_slices": 0}])
def test_a_schedule_of_nothing_is_refused(counts):
    with pytest.raises(ScheduleError, match=r"empty: 0 (microbatches|slices); expected 1 or more"):
        Schedule.from_arrays("empty", Placement.line(1), [np.zeros((0, 3))], **counts)


def test_columns_that_do_not_fit_together_are_refused():
    for changes in ({"offsets": SCHEDULE.offsets[:-1]}, {"stage": SCHEDULE.stage[1:]}, {"stage": SCHEDULE.stage / 2}):
        with pytest.raises(ScheduleError, match=r"drawn: the (offsets|column stage) .*; expected"):
            replace(SCHEDULE, **changes)


def test_the_number_of_orders_must_be_the_number_of_ranks():
    with pytest.raises(ScheduleError, match="1 orders for 2 ranks"):
        Schedule.from_arrays("short", Placement.line(2), [np.zeros((0, 3))], num_microbatches=1)


def test_forward_only_keeps_the_forwards_in_order():
    schedule = build("1f1b", ranks=2, microbatches=3)

    forwards = schedule.forward_only()

    assert [[str(action) for action in rank] for rank in forwards] == [["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"]]
    assert forwards.is_forward_only
    assert not schedule.is_forward_only


@pytest.mark.parametrize("family", ["1f1b", "chimera", "interleaved-1f1b"])
def test_the_first_microbatches_keep_their_order_and_route(family):
    forwards = build(family, ranks=2, microbatches=4).forward_only()

    for number in (1, 2, 3, 4):
        first = forwards.first_microbatches(number)
        assert first.num_microbatches == len(first.route_of_microbatch) == number
        assert first.route_of_microbatch.tolist() == forwards.route_of_microbatch[:number].tolist()
        assert list(first) == [[each for each in order if each.microbatch < number] for order in forwards]
        lower(first)


@pytest.mark.parametrize(
    "order",
    [np.array([0, 0, 0]), np.array([[0, 0]]), np.zeros((1, 5), int), np.zeros((1, 1, 3), int), [[0, 0, 0]], None],
)
def test_arrays_of_another_shape_are_refused(order):
    with pytest.raises(
        ScheduleError, match=r"shape, rank 0: .*; expected an array with one row per action: kind, stage"
    ):
        Schedule.from_arrays("shape", Placement.line(1), [order], num_microbatches=1)


@pytest.mark.parametrize("entry", ["0F0", ("0F0",), None, OverlappedPair("0F0", "0B0")])
def test_an_order_of_anything_but_actions_is_refused(entry):
    with pytest.raises(ScheduleError, match=r"^texts, rank 1: .*; expected an Action or an OverlappedPair$"):
        Schedule.from_actions("texts", Placement.line(2), [[], [entry]], num_microbatches=1)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (Action("F", 0, 0), r"rank 0: kind is of type <U\d+; expected whole numbers"),
        (Action(Kind.FORWARD, 0.5, 0), "rank 0: kind is of type float64; expected whole numbers"),
        (Action(Kind.FORWARD, None, 0), "rank 0: kind is of type object; expected whole numbers"),
    ],
)
def test_an_action_of_anything_but_whole_numbers_is_refused(action, told):
    with pytest.raises(ScheduleError, match=told):
        Schedule.from_actions("numbers", Placement.line(1), [[action]], num_microbatches=1)
