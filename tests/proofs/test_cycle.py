"""Orders that wait for each other in a circle are refused, and the shortest circle is told as a chain."""

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir.deps import NONE
from penstock.placement import Placement
from penstock.proofs import check
from penstock.proofs.cycle import shortest_cycle
from penstock.proofs.report import Subject
from tests.proofs.tables import (
    assert_refused,
    edited,
    feasible_cases,
    find,
    refusal,
    rewritten,
    runs,
    schedule_of,
    violations_of,
    with_orders,
)
from tests.support.work import lines_run


def test_crossing_orders_are_told_as_a_chain():
    crossing = schedule_of("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """)

    error = assert_refused(crossing, (0, 1, "0B0"), "waits for 1B0 (rank 1, position 2)")
    assert len(error.violations) == 1
    assert error.violations[0].problem == (
        "waits for 1B0 (rank 1, position 2), which is after 1F1 (position 1), "
        "which waits for 0F1 (rank 0, position 2), which is after 0B0"
    )
    assert error.violations[0].fix == "Move 0F1 before 0B0 on rank 0"


def test_the_shortest_cycle_is_told_where_the_first_rows_to_block_form_a_longer_one():
    subject = Subject(schedule_of("0F0 0F1 0F2\n1F0 1F1 1F2 1F3\n2F0 2F1"))
    before = np.full((9, 1), NONE, np.int32)
    before[[0, 3, 7], 0] = [4, 8, 2]  # the first rows of the ranks wait in a circle of three
    before[[1, 5], 0] = [6, 2]  # 0F1 waits for 1F3, which is after 1F2, which waits for 0F2

    cycle = shortest_cycle(subject, before, reached=np.array([0, 3, 7]))

    assert [(row, before[row, 0]) for row in cycle] == [(1, 6), (5, 2)]


def test_a_cycle_through_pairs_enters_one_member_and_leaves_by_the_other():
    schedule = schedule_of("(0F0;0F1)OVERLAP_F_B\n(1F0;1F1)OVERLAP_F_B", microbatches=2)
    before = np.full((4, 1), NONE, np.int32)
    before[[1, 3], 0] = [2, 0]  # the second member of each pair waits for the first member of the other

    cycle = shortest_cycle(Subject(schedule), before, reached=np.array([0, 2]))

    assert [(row, before[row, 0]) for row in cycle] == [(1, 2), (3, 0)]


def test_pairs_wait_for_what_either_of_them_needs():
    crossing = schedule_of("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1F1 1B0 1B1
    """)

    assert_refused(crossing, (0, 2, "0B0"), "which waits for 0F1 (rank 0, position 1), which is paired with 0B0")


def test_a_program_with_crossing_orders_tells_the_cycle_not_the_transports():
    program = rewritten(
        schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"),
        """
        0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
        """,
    )

    error = assert_refused(program, (0, 3, "0B0"), "waits for 1B0 (rank 1, position 4), which is after 1F1")
    assert len(error.violations) == 1


@given(feasible_cases())
def test_random_changes_are_refused_exactly_where_a_walk_gets_stuck(case):
    orders = [list(case.schedule[rank]) for rank in range(len(case.schedule))]
    for _ in range(case.chance.randint(1, 3)):
        order = case.chance.choice(orders)
        order.insert(case.chance.randrange(len(order)), order.pop(case.chance.randrange(len(order))))
    changed = with_orders(case.schedule, orders)

    if runs(changed):
        check(changed)
        return
    with pytest.raises(ScheduleError, match=r"waits for|runs before"):
        check(changed)


@given(feasible_cases())
def test_a_told_cycle_closes_and_is_no_longer_than_the_number_of_ranks(case):
    schedule = case.schedule
    if len(schedule) < 2 or schedule.num_microbatches < 2:
        return
    rank = case.chance.randrange(len(schedule))
    reversed_rank = edited(schedule, lambda orders: orders[rank].sort(key=lambda a: (a.microbatch, a.kind, a.stage)))

    for violation in violations_of(reversed_rank):
        if "waits for" in violation.problem:
            assert 2 <= violation.problem.count("waits for") <= len(schedule)
            end = violation.problem.removesuffix(f" (rank {violation.rank}, position {violation.position})")
            assert end.endswith(violation.action)


def deadlock(size):
    """Eight ranks that run all forwards first, but for rank 0, whose first backward comes second."""
    forwards, backwards = ([f"{kind}{m}" for m in range(size)] for kind in "FB")
    early = [forwards[0], backwards[0], *forwards[1:], *backwards[1:]]
    orders = [early, *[forwards + backwards] * 7]
    text = "\n".join(" ".join(f"{s}{action}" for action in order) for s, order in enumerate(orders))
    return schedule_of(text, placement=Placement.line(8))


@pytest.mark.slow
def test_the_lines_that_run_to_find_the_cycle_of_a_deadlock_grow_with_its_size_and_not_with_the_square():
    found = []

    def num_lines(size):
        schedule = deadlock(size)
        return lines_run(lambda: found.append(refusal(schedule)))

    assert num_lines(200) < 2.2 * num_lines(100)
    assert [error.violations[0].problem.count("waits for") for error in found] == [2, 2]
    assert find(deadlock(100), "0B0") == (0, 1)
