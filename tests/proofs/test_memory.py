"""Limits hold at every position, and a slot that is overwritten while alive is refused where that happens."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.instruction import Op
from penstock.ir.split_backwards import with_split_backwards
from penstock.lowering import assign_slots, lower
from penstock.proofs import Limit, check
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts, simulate
from tests.proofs.tables import (
    assert_refused,
    edited,
    feasible_cases,
    find,
    lowered,
    refusal,
    schedule_of,
    violations_of,
)
from tests.simulation.drawing import sharded as without_slots

TWO = "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD"
SECONDS = {"forward_s": (1.0,), "backward_s": (1.0,)}


def with_slot(table, text, slot):
    rank, position = find(table, text)

    def change(orders):
        orders[rank][position] = replace(orders[rank][position], slot=slot)

    return edited(table, change)


@pytest.mark.feature("D4")
@pytest.mark.parametrize("prepare", [lambda schedule: schedule, lower], ids=["schedule", "program"])
def test_the_first_position_over_the_limit_is_refused(prepare):
    table = prepare(build("gpipe", ranks=2, microbatches=3))

    limit = "2 activations"
    error = assert_refused(table, "0F2", "needs 3 activations", "of rank 0 is 2", "raise the limit", memory_limit=limit)
    assert [violation.action for violation in error.violations] == ["0F2", "1F2"]


def activations(*counts):
    return [f"{count} activations" for count in counts]


def test_a_limit_per_rank_counts_for_its_rank_and_may_be_just_met():
    schedule = build("1f1b", ranks=3, microbatches=4)

    assert check(schedule, memory_limit=activations(3, 2, 1)).peak_activations == [3, 2, 1]
    error = assert_refused(schedule, (1, 1, "1F1"), "limit of rank 1 is 1", memory_limit=activations(3, 1, 1))
    assert {violation.rank for violation in error.violations} == {1}


@pytest.mark.feature("D4")
def test_the_limit_in_bytes_counts_weight_contexts():
    schedule = with_split_backwards(build("gpipe", ranks=1, microbatches=2))

    costs = Costs(activation_bytes=(10,), weight_context_bytes=(4,))
    assert check(schedule, costs=costs, memory_limit=20).peak_bytes == [20]
    assert_refused(schedule, (0, 1, "0F1"), "needs 20 bytes alive", "is 19", costs=costs, memory_limit=19)


def test_the_limit_in_bytes_counts_messages_of_programs_and_what_is_always_there():
    schedule = build("1f1b", ranks=2, microbatches=2)
    costs = Costs(activation_bytes=(100,), message_bytes=(10,), parameter_bytes=(1000, 2000), optimizer_bytes=(1,))
    program = lower(schedule)

    facts = check(program, costs=costs)

    assert facts.peak_bytes == simulate(program, replace(costs, **SECONDS)).peak_bytes
    assert facts.static_bytes == [1001, 2001]
    assert facts.peak_bytes[0] > check(schedule, costs=costs).peak_bytes[0] == 200
    most = [live + static for live, static in zip(facts.peak_bytes, facts.static_bytes, strict=True)]
    assert check(program, costs=costs, memory_limit=most) == facts
    error = refusal(program, costs=costs, memory_limit=[most[0], most[1] - 1])
    assert [violation.rank for violation in error.violations] == [1]


def test_what_is_not_given_counts_as_0_and_is_listed():
    schedule = build("1f1b", ranks=2, microbatches=2)
    costs = Costs(activation_bytes=(10,), message_bytes=(1,), gradient_bytes=(1,), optimizer_bytes=(1,))

    lacking = ("weight_context_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "parameter_bytes")
    assert check(lower(schedule), costs=costs).not_counted == lacking
    assert check(schedule, costs=costs).not_counted == (*lacking, "message_bytes")
    assert check(schedule).not_counted == ()


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("20GiB", 20 * 2**30, "bytes"),
        ("1.5 kb", 1500, "bytes"),
        ("2tib", 2**41, "bytes"),
        ("7B", 7, "bytes"),
        ("7", 7, "bytes"),
        (np.int32(7), 7, "bytes"),
        ("12 activations", 12, "activations"),
        ("1activation", 1, "activations"),
        ("2.5 Microbatches", Fraction(5, 2), "microbatches"),
    ],
)
def test_limits_are_bytes_with_a_unit_or_counts(text, amount, unit):
    limit = Limit.read(text)

    assert (limit.amounts, limit.unit, limit.in_bytes) == ((amount,), unit, unit == "bytes")


@pytest.mark.parametrize(
    ("name", "shape", "held"),
    [
        ("1f1b", {}, 4),
        ("zbv", {}, 8),
        ("interleaved-1f1b", {"stages_per_rank": 2}, 11),
        ("seq1f1b", {"slices": 2}, 5),
    ],
)
def test_a_limit_in_microbatches_counts_what_each_leaves_on_a_rank(name, shape, held):
    schedule = build(name, ranks=4, microbatches=8, **shape)
    num_parts = {"1f1b": 1}.get(name, 2)
    limit = f"{held / num_parts} microbatches"
    less = f"{(held - 0.5) / num_parts} microbatches"

    assert max(check(schedule, memory_limit=limit).peak_activations) == held
    error = refusal(schedule, memory_limit=less)
    assert f"needs {held} activations alive at once; the limit of rank 0 is {held - 1} ({less})" in str(error)


def test_limits_may_be_larger_than_any_memory():
    largest = np.iinfo(np.int64).max

    assert Limit.read([10**30, 7]).of_ranks(2, Fraction(1)).tolist() == [largest, 7]


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("20Gbit", "memory_limit: '20Gbit' has no known unit; expected one of bytes, b, kb, kib, mb"),
        ("much", "memory_limit: 'much'; give \"20GiB\""),
        (-1, "memory_limit: -1; give a limit of 1 or more"),
        ("0 activations", "'0 activations'; give a limit of 1 or more"),
        (2.5, "2.5 of type float; give"),
        (True, "True of type bool; give"),
        ([], 'give "20GiB"'),
        (["2 activations", "3 GiB"], "for all ranks alike or per rank"),
        (activations(1, 2, 3), "3 values for 2 ranks; give one, or one per rank"),
        (4096, "4096 is a number of bytes, but there are no costs to say how large activations are"),
        ("20GiB", 'or count: "6 microbatches"'),
    ],
)
def test_limits_that_say_nothing_are_refused_with_what_was_expected(limit, told):
    with pytest.raises(ConfigError) as caught:
        check(build("1f1b", ranks=2, microbatches=2), memory_limit=limit)

    assert caught.value.key == "memory_limit"
    assert told in str(caught.value)


def test_costs_that_lack_what_a_limit_needs_are_refused_with_how_to_measure_it():
    schedule = build("1f1b", ranks=2, microbatches=2)

    with pytest.raises(ConfigError, match=r"memory_limit: 9 is .* costs have no activation_bytes .* penstock profile"):
        check(schedule, costs=Costs(parameter_bytes=(1,)), memory_limit=9)
    with pytest.raises(ConfigError, match=r"activation_bytes: 3 entries for 2 stages"):
        check(schedule, costs=Costs(activation_bytes=(1, 2, 3)))
    with pytest.raises(ConfigError, match=r"costs: expected Costs, got LayerCosts; add them up by costs\.of_stages"):
        check(schedule, costs=LayerCosts(activation_bytes=[1, 2]))
    with pytest.raises(ConfigError, match="costs: expected Costs, got str"):
        check(schedule, costs="F=1")


def test_messages_in_buffers_are_counted():
    facts = check(lower(schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")))

    assert facts.peak_unsent == [1, 1]
    assert all(1 <= peak <= 2 for peak in facts.peak_received)


def test_an_activation_slot_that_is_overwritten_is_refused():
    broken = with_slot(with_slot(lowered(), "0F1", 0), "0B1", 0)
    (_, first), (_, end) = find(broken, "0F0"), find(broken, "0B0")

    assert_refused(
        broken,
        "0F1",
        f"overwrites slot 0, where the activation of 0F0 (position {first}) lives until 0B0 (position {end})",
        "Take another slot",
    )


@pytest.mark.parametrize(
    ("program", "text", "slot"),
    [(lowered("gpipe", offload=[0]), text, 0) for text in ("0OFFLOAD1", "0RELOAD1")] + [(lowered(), "0B1", 5)],
)
def test_a_copy_or_a_backward_of_another_slot_is_refused(program, text, slot):
    broken = with_slot(program, text, slot)

    assert_refused(broken, text, f"reads slot {slot}; 0F1 (position", "saved its activation in slot 1", "slot 1")


def test_limits_count_what_is_on_the_device():
    schedule = build("gpipe", ranks=2, microbatches=6)
    program = lower(schedule, offload=[0, 1])
    costs = Costs.uniform(activation_bytes=100)

    assert check(program, memory_limit="2 activations").peak_activations == [2, 2]
    assert check(program, costs=costs, memory_limit=200).peak_bytes == [200, 200]
    # 0F0 has left, and 0RELOAD0 has brought it back.
    assert_refused(program, "0F5", "needs 2 activations", memory_limit="1 activation")
    assert_refused(lower(schedule, offload=[1]), (0, 4, "0F2"), "needs 300 bytes", costs=costs, memory_limit=200)


@pytest.mark.feature("0.10")
def test_a_receive_slot_that_is_overwritten_is_refused():
    program = lowered("gpipe")
    (_, first), (_, second) = find(program, "1RECV_F0"), find(program, "1RECV_F1")
    assert program[1][first].slot != program[1][second].slot
    broken = with_slot(program, "1RECV_F1", program[1][first].slot)

    assert_refused(broken, "1RECV_F1", "the message of 1RECV_F0", "lives until 1F0", "Take another slot")


def test_a_send_slot_that_is_overwritten_is_refused_at_the_action_that_makes_the_message():
    program = lower(schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"))
    late = edited(
        program, lambda orders: orders[0].insert(find(program, "0F1")[1], orders[0].pop(find(program, "0SEND_F0")[1]))
    )
    broken = with_slot(with_slot(late, "0SEND_F0", 0), "0SEND_F1", 0)
    _, send = find(broken, "0SEND_F0")

    assert_refused(broken, "0F1", "overwrites slot 0", f"lives until 0SEND_F0 (position {send})")


@pytest.mark.parametrize("pair", ["(0F1;0B0)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B"])
def test_a_pair_may_not_hand_a_slot_from_one_member_to_the_other(pair):
    program = lower(schedule_of(f"0F0 {pair} 0B1"))
    apart = program.with_slots(program.microbatch.copy())
    shared = program.with_slots(np.zeros_like(program.slot))

    assert violations_of(apart) == ()
    assert_refused(shared, "0F1", "overwrites slot 0", "lives until 0B0")


@pytest.mark.feature("0.10", "B16")
@given(feasible_cases())
def test_a_shared_slot_is_refused_exactly_where_two_lives_overlap(case):
    program = lower(case.schedule)
    slot = program.slot.copy()
    slot[program.op == Op.FORWARD] %= 2
    made_by = {(program.stage[r], program.microbatch[r], program.slice[r]): r for r in np.flatnonzero(program.op == 0)}
    for row in np.flatnonzero(program.is_compute):
        slot[row] = slot[made_by[program.stage[row], program.microbatch[row], program.slice[row]]]
    changed = program.with_slots(slot)

    assert bool(violations_of(changed)) == overlaps(changed)


def overlaps(program):
    """Run each rank and keep what its activation slots hold."""
    for rank in range(len(program)):
        held = {}
        for row in program[rank]:
            name = (row.stage, row.microbatch, row.slice)
            if row.op is Op.FORWARD and held.setdefault(row.slot, name) != name:
                return True
            if row.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                del held[row.slot]
    return False


def sharded(*lines):
    return assign_slots(without_slots(*lines))


def test_the_most_whole_stages_of_each_rank_are_a_fact_of_the_program():
    assert check(sharded(TWO)).peak_whole == [2]
    assert check(lower(build("1f1b", ranks=2, microbatches=2))).peak_whole is None
    assert check(build("1f1b", ranks=2, microbatches=2)).peak_whole is None


def test_a_stage_too_many_is_refused_where_it_is_gathered():
    with pytest.raises(ScheduleError) as caught:
        check(sharded(TWO), residency=1)

    (violation,) = caught.value.violations
    assert (violation.rank, violation.position, violation.action) == (0, 2, "1UNSHARD")
    assert violation.problem == "makes 2 stages whole at once; rank 0 may have 1"
    assert violation.fix == "Reshard one of them before it, or raise residency"
    check(sharded(TWO), residency=2)
