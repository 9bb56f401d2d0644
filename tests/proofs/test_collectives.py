"""Collectives that come too early, twice, without a member, or in crossing orders are refused."""

from dataclasses import replace

import pytest

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_messages, assign_slots, lower
from penstock.proofs import check
from penstock.schedules import build
from tests.proofs.tables import (
    assert_refused,
    edited,
    find,
    instruction,
    lowered,
    refusal,
    swapped,
    without,
)

TIED = {"tied_groups": [(0, 1), (1, 2)], "optimizer_step": True}
PROGRAM = lowered(ranks=3, **TIED)
UNREDUCED = without(without(PROGRAM, "0REDUCE_TIED0"), "1REDUCE_TIED0")
FOREIGN = edited(PROGRAM, lambda orders: orders[2].insert(-1, instruction(Op.REDUCE_TIED, 2, peer=0)))
MISSING = {
    "a member of a tied group": (
        without(PROGRAM, "1REDUCE_TIED0"), 1, ["missing for stage 1", "0REDUCE_TIED0 (rank 0,", "Add it on rank 1"],
    ),
    "a tied group, on one rank": (UNREDUCED, 0, ["tied group 0 is missing for stage 0", "stay equal"]),
    "a tied group, on the other": (UNREDUCED, 1, ["tied group 0 is missing for stage 1", "stay equal"]),
    "the step": (without(PROGRAM, "1STEP"), 1, ["the optimizer step is missing", "0STEP (rank 0,", "Add it at"]),
}  # fmt: skip


@pytest.mark.parametrize(("program", "rank", "words"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_refused_at_the_end_of_its_rank(program, rank, words):
    assert_refused(program, (rank, len(program[rank]), ""), *words)


def test_a_stage_outside_the_group_is_refused():
    assert_refused(FOREIGN, "2REDUCE_TIED0", "is no member of the reduction of tied group 0", "(0, 1)")


@pytest.mark.parametrize("text", ["0REDUCE_GRAD", "0REDUCE_TIED0"])
def test_a_reduction_before_the_last_backward_or_there_twice_is_refused(text):
    program = lowered(ranks=3, **TIED)
    position = find(program, "0B2")[1]
    broken = edited(program, lambda orders: orders[0].insert(position, orders[0].pop(find(program, text)[1])))

    assert_refused(
        broken, (0, position, text), f"runs before 0B2 (position {position + 1}), the last backward", "after 0B2"
    )
    position = find(program, text)[1]
    broken = edited(program, lambda orders: orders[0].insert(position, orders[0][position]))
    assert_refused(broken, (0, position + 1, text), "again as", f"position {position})", "Drop one")


def test_stages_whose_gradient_is_never_reduced_are_told_together():
    broken = without(without(lowered(ranks=3), "0REDUCE_GRAD"), "2REDUCE_GRAD")

    error = assert_refused(broken, "0B2", "one 0REDUCE_GRAD after it")
    assert [found.action for found in error.violations] == ["0B2", "2B2"]


def sharded(**options):
    return lower(build("looped-bfs", ranks=1, microbatches=2, stages_per_rank=2), shard="full", **options)


def test_a_sharded_stage_may_be_reduced_before_its_last_backward_but_not_for_nothing():
    program = lower(build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2), shard="full", residency=1)
    texts = [str(row) for row in program[0]]
    assert texts.count("0REDUCE_GRAD") > 1  # of which all but the last are early
    check(program)

    place = texts.index("0REDUCE_GRAD")
    twice = edited(program, lambda orders: orders[0].insert(place, orders[0][place]))
    start = edited(program, lambda orders: orders[0].insert(1, orders[0][place]))

    nothing = "reduces nothing: since its stage was reduced last, or from the start, it has run no backward"
    assert_refused(twice, (0, place + 1, "0REDUCE_GRAD"), nothing)
    assert nothing in [found.problem for found in refusal(start).violations]


def test_a_sharded_stage_whose_last_gradients_are_never_reduced_is_refused():
    program = sharded(residency=1)
    texts = [str(row) for row in program[0]]
    last, backward = texts.index("0REDUCE_GRAD"), texts.index("0B0")
    early = edited(program, lambda orders: orders[0].insert(backward + 1, orders[0].pop(last)))

    error = assert_refused(
        early, (0, backward + 1, "0REDUCE_GRAD"), f"runs before 0B1 (position {last})", "is never reduced"
    )
    assert error.violations[0].fix == "Add a reduction after 0B1"
    assert_refused(without(program, "0REDUCE_GRAD"), (0, last - 1, "0B1"), "expected one 0REDUCE_GRAD after it")


def test_one_reduction_is_enough_for_all_stages_of_a_unit_that_is_sharded():
    program = sharded(residency=2, units=[(0, 1)])
    assert [str(row) for row in program[0] if row.op is Op.REDUCE_GRADIENT] == ["0REDUCE_GRAD"]
    check(program)

    apart = refusal(replace(program, units=()))
    assert [(found.action, found.fix) for found in apart.violations] == [("1B1", "Add 1REDUCE_GRAD after it")]


def test_a_program_without_any_reduction_is_refused_unless_it_says_so():
    program = assign_slots(add_messages(Program.from_schedule(build("1f1b", ranks=2, microbatches=3))))

    assert check(program).omits_reductions
    assert [found.action for found in refusal(replace(program, omits_reductions=False)).violations] == ["0B2", "1B2"]


def test_a_program_that_omits_some_reductions_only_is_refused():
    program = replace(without(lowered(), "1REDUCE_GRAD"), omits_reductions=True)
    step_alone = without(without(lowered(optimizer_step=True), "0REDUCE_GRAD"), "1REDUCE_GRAD")

    assert_refused(program, "1B2", "expected one 1REDUCE_GRAD after it")
    assert len(refusal(replace(step_alone, omits_reductions=True)).violations) == 2


@pytest.mark.parametrize("op", [Op.REDUCE_GRADIENT, Op.REDUCE_TIED, Op.OPTIMIZER_STEP])
def test_what_belongs_to_training_is_refused_where_nothing_trains(op):
    program = lower(build("1f1b", ranks=1, microbatches=2, forward_only=True), tied_groups=[(0,)])
    row = instruction(op, 0, peer=0)
    broken = edited(program, lambda orders: orders[0].append(row))

    assert not check(program).omits_reductions
    assert_refused(broken, (0, 2, str(row)), "belongs to training, but the program has no backward", "Drop it")


def test_a_second_step_and_a_step_that_is_not_last_are_refused():
    program = lowered(**{"optimizer_step": True})
    end = len(program[0])
    twice = edited(program, lambda orders: orders[0].append(orders[0][-1]))
    early = edited(program, lambda orders: orders[0].insert(end - 2, orders[0].pop()))

    assert_refused(twice, (0, end - 1, "0STEP"), "is taken again: 0STEP", "Drop one")
    assert_refused(early, (0, end - 2, "0STEP"), "runs before 0REDUCE_GRAD", "Move it to the end")


@pytest.mark.feature("E9")
def test_crossing_orders_of_two_groups_are_refused_with_both_ranks():
    program = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1), (0, 1)])
    broken = swapped(program, "1REDUCE_TIED0", "1REDUCE_TIED1")

    error = assert_refused(broken, "0REDUCE_TIED0", "one order on all ranks")
    assert "rank 1 runs 1REDUCE_TIED1 before 1REDUCE_TIED0" in error.violations[0].problem


@pytest.mark.feature("E9")
def test_orders_that_cross_over_three_ranks_are_refused():
    program = lower(build("1f1b", ranks=3, microbatches=2), tied_groups=[(0, 1), (1, 2), (0, 2)])
    broken = swapped(program, "0REDUCE_TIED0", "0REDUCE_TIED2")

    error = assert_refused(broken, "0REDUCE_TIED2", "one order")
    assert "rank 1 runs" in error.violations[0].problem
    assert "rank 2 runs" in error.violations[0].problem


WAITING = lower(build("1f1b", ranks=3, microbatches=4), barriers=True)


@pytest.mark.feature("B15")
def test_a_barrier_that_a_rank_lacks_is_refused():
    last = max(index for index, row in enumerate(WAITING[1]) if row.op is Op.BARRIER)
    broken = edited(WAITING, lambda orders: orders[1].pop(last))

    assert_refused(broken, (1, len(broken[1]), ""), "a barrier is missing", "waits for all ranks", "Add it on rank 1")


@pytest.mark.parametrize("end", ["0SEND_F1", "1RECV_F1"])
def test_a_message_that_crosses_a_barrier_is_refused(end):
    rank, position = find(WAITING, end)

    def behind_next_barrier(orders):
        order = orders[rank]
        barrier = next(index for index in range(position, len(order)) if order[index].op is Op.BARRIER)
        order.insert(barrier, order.pop(position))

    found = refusal(edited(WAITING, behind_next_barrier))
    assert any("expected as many" in str(violation) and "0SEND_F1" in str(violation) for violation in found.violations)


def test_a_barrier_on_different_sides_of_a_tied_reduction_is_refused():
    program = lower(build("1f1b", ranks=3, microbatches=4), barriers=True, tied_groups=[(0, 2)])
    rank, position = find(program, "0REDUCE_TIED0")

    def before_last_barrier(orders):
        orders[rank].insert(position - 1, orders[rank].pop(position))

    found = refusal(edited(program, before_last_barrier))
    assert any("wait for each other" in str(violation) for violation in found.violations)
