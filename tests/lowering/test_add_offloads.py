"""Offloads: what a stage keeps leaves its device right behind its forward, and is back before the row that reads it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.formats import WITH_COMMUNICATION
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.reading import read_table
from penstock.ir.recompute import with_recompute
from penstock.ir.split_backwards import with_split_backwards
from penstock.ir.writing import write_table
from penstock.lowering import add_offloads, assign_slots, lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import DEFAULT_ORDER, drawn, groups, lines, program_of
from tests.support.strategies import feasible_schedules

COPIES = (Op.OFFLOAD, Op.RELOAD)
TRAINING = [name for name in FAMILIES if name != "forward-only"]
VARIANTS = {
    "plain": lambda schedule: schedule,
    "recomputed": with_recompute,
    "one stage recomputed": lambda schedule: with_recompute(schedule, [0]),
    "split": with_split_backwards,
}


def assert_becomes(before, after, *, stages=(0,), ahead=1, **sizes):
    assert drawn(add_offloads(program_of(before, **sizes), stages, ahead)) == lines(after)


def without_copies(program):
    return program.select(np.flatnonzero(~np.isin(program.op, COPIES)))


def test_an_offload_is_behind_its_forward_and_a_reload_one_computation_ahead_of_the_backward():
    assert_becomes(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0OFFLOAD3 0RELOAD1 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3",
    )


def test_a_reload_may_be_further_ahead_or_right_before():
    before = "0F0 0F1 0F2 0F3 0B0 0B3 0B2 0B1"

    assert_becomes(
        before, "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0F3 0RELOAD2 0B0 0RELOAD1 0B3 0B2 0B1", ahead=2
    )
    assert_becomes(
        before,
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0RELOAD0 0B0 0RELOAD3 0B3 0RELOAD2 0B2 0RELOAD1 0B1",
        ahead=0,
    )


def test_no_stages_are_the_program_itself():
    schedule = build("zbv", ranks=2, microbatches=4)

    assert lower(schedule, offload=[]) == lower(schedule, offload=range(0)) == lower(schedule)
    assert lower(schedule).digest() == lower(schedule, offload=()).digest()


@pytest.mark.feature("X26")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=() if place % len(VARIANTS) == turn else pytest.mark.slow)
        for place, name in enumerate(TRAINING)
        for turn, variant in enumerate(VARIANTS)
    ],
)
def test_every_family_with_all_stages_offloaded_is_proved_under_every_transport(name, variant):
    for num_slices in (1, 2) if FAMILIES[name].takes_slices else (1,):
        schedule = VARIANTS[variant](build(name, ranks=4, microbatches=8, slices=num_slices))
        stages = range(schedule.num_stages)
        plain, program = lower(schedule), lower(schedule, offload=stages, optimizer_step=True)

        for transport in DEFAULT_ORDER:
            facts = check(program, transport)
        check(lower(schedule, "coalesced", offload=stages), "all")
        assert (np.bincount(program.op, minlength=16)[Op.OFFLOAD] > 0) == (name != "sequential" or num_slices > 1)
        assert all(a <= b for a, b in zip(facts.peak_activations, check(plain).peak_activations, strict=True))
        assert without_copies(lower(schedule, offload=stages)) == plain


@given(feasible_schedules(), st.sampled_from(list(VARIANTS)), st.data())
def test_random_programs_with_offloads_are_proved_and_keep_to_the_rules(schedule, variant, data):
    if schedule.is_forward_only:
        return
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    program = lower(VARIANTS[variant](schedule), offload=stages)

    check(program, "posted")
    for rank in range(program.num_ranks):
        assert_rules(groups(program, rank), stages)


def assert_rules(units, stages):
    """Each OFFLOAD is right behind its F (or its pair), each RELOAD one unit of computations before its reader."""
    computations = [unit for unit in units if unit[0].op.is_compute]
    reader = {}
    for number, unit in enumerate(computations):
        for row in unit:
            if row.op in (Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT):
                reader.setdefault((row.stage, row.microbatch, row.slice), number)
    moved = {(row.stage, row.microbatch, row.slice) for unit in units for row in unit if row.op is Op.OFFLOAD}
    number, maker = -1, {}
    for before, unit in pairwise([[], *units]):
        number += unit[0].op.is_compute
        for row in unit:
            key = (row.stage, row.microbatch, row.slice)
            if row.op is Op.FORWARD:
                maker[key] = number
                is_far = row.stage in stages and reader[key] - 1 - number > 1
                assert (key in moved) == is_far
            if row.op is Op.OFFLOAD:
                assert maker[key] == number
                assert before[0].op in (Op.FORWARD, Op.OFFLOAD) or len(before) == 2
            if row.op is Op.RELOAD:
                assert number == reader[key] - 2


@pytest.mark.parametrize("format", WITH_COMMUNICATION)
def test_files_hold_them(format):
    schedule = build("seq1f1b", ranks=2, microbatches=4, slices=2)
    program = lower(schedule, offload=[0, 1])
    if format.startswith("deepspeed"):
        return  # which knows whole microbatches of one stage a rank

    again = read_table(write_table(program, format), file="x", format=format)

    assert isinstance(again, Program)
    assert (assign_slots(again) if format == "csv" else again).digest() == program.digest()


def test_torch_knows_nothing_of_them():
    schedule = build("1f1b", ranks=2, microbatches=4)

    assert lower(schedule, offload=[0]).to_csv(torch_only=True) == lower(schedule).to_csv(torch_only=True)


@pytest.mark.parametrize(
    ("offload", "told"),
    [
        ([4], "offload: stage 4 of 1f1b; expected stages from 0 to 3"),
        ([-1], "offload: stage -1 of 1f1b; expected stages from 0 to 3"),
        (["0"], "offload: .*is no stage; expected stages from 0 to 3"),
        ([True], "offload: .*is no stage; expected stages from 0 to 3"),
        (2, r"offload: .*; expected stages from 0 to 3, such as \[0\]"),
    ],
)
def test_what_is_no_stage_is_refused(offload, told):
    with pytest.raises(ConfigError, match=told):
        lower(build("1f1b", ranks=4, microbatches=4), offload=offload)


def test_without_a_backward_there_is_nothing_to_offload():
    schedule = build("1f1b", ranks=2, microbatches=4, forward_only=True)

    with pytest.raises(ScheduleError, match=r"has no backward.*leave out offload"):
        lower(schedule, offload=[0])
    assert lower(schedule, offload=[]) == lower(schedule)


@pytest.mark.parametrize("ahead", [-1, 1.5, True, None])
def test_a_wrong_distance_is_refused(ahead):
    with pytest.raises(ConfigError, match=r"ahead: .*; expected a number of computations, 0 or more"):
        add_offloads(program_of("0F0 0B0"), [0], ahead)
