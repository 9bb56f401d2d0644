"""Collectives that come too early, twice, without a member, or in crossing orders are refused."""

import pytest

from penstock.check import check
from penstock.ir.instruction import Op
from penstock.lower import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.check.tables import assert_refused, edited, find, instruction, lowered, schedule_of, swapped, without

TIED = {"tied_groups": [(0, 1), (1, 2)], "optimizer_step": True}


def test_reductions_and_step_pass_where_lowering_puts_them():
    check(lowered(ranks=3, **TIED))


def test_several_tied_stages_on_one_rank_pass():
    schedule = schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement=Placement.loop(2, 4))

    check(lower(schedule, tied_groups=[(0, 2, 3)], optimizer_step=True))


@pytest.mark.parametrize("text", ["0REDUCE_GRAD", "0REDUCE_TIED0"])
def test_a_reduction_before_the_last_backward_is_refused(text):
    program = lowered(ranks=3, **TIED)
    position = find(program, "0B2")[1]
    broken = edited(program, lambda orders: orders[0].insert(position, orders[0].pop(find(program, text)[1])))

    assert_refused(
        broken, (0, position, text), f"runs before 0B2 (position {position + 1}), the last backward", "behind 0B2"
    )


@pytest.mark.parametrize("text", ["0REDUCE_GRAD", "0REDUCE_TIED0"])
def test_a_reduction_that_is_there_twice_is_refused(text):
    program = lowered(ranks=3, **TIED)
    position = find(program, text)[1]
    broken = edited(program, lambda orders: orders[0].insert(position, orders[0][position]))

    assert_refused(broken, (0, position + 1, text), "again as", f"position {position})", "Drop one")


def test_a_missing_member_of_a_tied_group_is_refused_with_both_ranks():
    broken = without(lowered(ranks=3, **TIED), "1REDUCE_TIED0")

    assert_refused(broken, (1, len(broken[1]), ""), "missing for stage 1", "0REDUCE_TIED0 (rank 0,", "Add it on rank 1")


def test_a_stage_outside_the_group_is_refused():
    program = lowered(ranks=3, **TIED)
    position = len(program[2]) - 1
    broken = edited(program, lambda orders: orders[2].insert(position, instruction(Op.REDUCE_TIED, 2, peer=0)))

    assert_refused(broken, (2, position, "2REDUCE_TIED0"), "is no member of the reduction of tied group 0", "(0, 1)")


def test_a_tied_group_that_does_not_exist_is_refused():
    broken = edited(lowered(), lambda orders: orders[0].append(instruction(Op.REDUCE_TIED, 0, peer=4)))

    assert_refused(broken, (0, len(broken[0]) - 1, "0REDUCE_TIED4"), "names the tied group 4; the program has 0")


def test_a_rank_without_the_step_is_refused():
    broken = without(lowered(ranks=3, **TIED), "1STEP")

    assert_refused(broken, (1, len(broken[1]), ""), "the optimizer step is missing", "0STEP (rank 0,", "Add it at")


def test_a_second_step_and_a_step_that_is_not_last_are_refused():
    program = lowered(**{"optimizer_step": True})
    end = len(program[0])
    twice = edited(program, lambda orders: orders[0].append(orders[0][-1]))
    early = edited(program, lambda orders: orders[0].insert(end - 2, orders[0].pop()))

    assert_refused(twice, (0, end - 1, "0STEP"), "is taken again: 0STEP", "Drop one")
    assert_refused(early, (0, end - 2, "0STEP"), "runs before 0REDUCE_GRAD", "Move it to the end")


def test_crossing_orders_of_two_groups_are_refused_with_both_ranks():
    program = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1), (0, 1)])
    broken = swapped(program, "1REDUCE_TIED0", "1REDUCE_TIED1")

    error = assert_refused(broken, (0, find(broken, "0REDUCE_TIED0")[1], "0REDUCE_TIED0"), "one order on all ranks")
    assert "rank 1 runs 1REDUCE_TIED1 before 1REDUCE_TIED0" in error.violations[0].problem


def test_orders_that_cross_over_three_ranks_are_refused():
    program = lower(build("1f1b", ranks=3, microbatches=2), tied_groups=[(0, 1), (1, 2), (0, 2)])
    broken = swapped(program, "0REDUCE_TIED0", "0REDUCE_TIED2")

    error = assert_refused(broken, (0, find(broken, "0REDUCE_TIED2")[1], "0REDUCE_TIED2"), "one order")
    assert "rank 1 runs" in error.violations[0].problem
    assert "rank 2 runs" in error.violations[0].problem
