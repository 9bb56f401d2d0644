"""Lowering: every schedule that can run becomes a program that is proved under the transport that it is made for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.ir import hot
from penstock.ir.deps import predecessors
from penstock.ir.linear_extension import walk_untimed, whole_starts
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from tests.lowering.programs import (
    DEFAULT_ORDER,
    assert_in_time,
    computations,
    crossings,
    drawn,
    lines,
    message,
    pairs,
)
from tests.proofs.machine import verdicts
from tests.proofs.tables import schedule_of
from tests.support.mutated_programs import MODELS
from tests.support.strategies import feasible_schedules, one_of_each_rank, schedules

WHOLE = """
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2
    """


def lowered(text, transport="posted", *, tied_groups=(), optimizer_step=False, **sizes):
    return lower(schedule_of(pairs(text), **sizes), transport, tied_groups=tied_groups, optimizer_step=optimizer_step)


def test_all_passes_make_the_whole_program():
    program = lowered(WHOLE, tied_groups=[(0, 1)], optimizer_step=True)

    assert drawn(program, slots=True) == lines(
        """
        0F0:0 0SEND_F0:0 0F1:1 0SEND_F1:0 0F2:2 0SEND_F2:0 0RECV_B0:0 0RECV_B1:1 0B0:0 0RECV_B2:0 0B1:1 0B2:2 0REDUCE_GRAD:0 0REDUCE_TIED0:0 0STEP:0
        1RECV_F0:0 1RECV_F1:1 1F0:0 1RECV_F2:0 1F1:1 1F2:2 1B0:0 1SEND_B0:0 1B1:1 1SEND_B1:0 1B2:2 1SEND_B2:0 1REDUCE_GRAD:0 1REDUCE_TIED0:0 1STEP:0
        """  # noqa: E501
    )


def test_forwards_alone_have_neither_reductions_nor_a_step():
    program = lowered("0F0 0F1\n1F0 1F1", tied_groups=[(0, 1)], optimizer_step=True)

    assert drawn(program) == lines("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1")


def test_the_stages_of_a_tied_group_are_sorted_and_counted_once():
    program = lowered("0F0 0B0\n1F0 1B0", tied_groups=[[1, 0, 1], [1]])

    assert program.tied_groups == ((0, 1), (1,))
    assert [line.count("REDUCE_TIED") for line in drawn(program)] == [1, 2]


@pytest.mark.parametrize("group", [(0, 2), (-1, 1), (7,)])
def test_a_tied_group_with_a_stage_that_does_not_exist_is_refused(group):
    with pytest.raises(ScheduleError) as caught:
        lowered("0F0 0B0\n1F0 1B0", tied_groups=[(0, 1), group])

    assert str(caught.value).startswith(f"tied group {tuple(sorted(group))}: the stages are 0..1; name stages")


def test_two_tied_stages_of_one_rank_are_refused_wherever_the_program_comes_from():
    """They share one parameter there, whose gradient would be reduced once for each of them."""
    told = r"tied group \(0, 1, 2\): stages 0 and 2 are on rank 0, where they share the parameter; name one stage"

    with pytest.raises(ScheduleError, match=told):
        lowered("0F0 2F0 2B0 0B0\n1F0 1B0", placement=Placement.explicit([0, 1, 0]), tied_groups=[(0, 1, 2)])
    program = lowered("0F0 2F0 2B0 0B0\n1F0 1B0", placement=Placement.explicit([0, 1, 0]), tied_groups=[(0, 1)])
    with pytest.raises(ScheduleError, match="stages 0 and 2 are on rank 0"):
        replace(program, tied_groups=((0, 2),))
    with pytest.raises(ScheduleError, match="stages 0 and 2 are on rank 0"):
        Program.from_json(program.to_json().replace('"tied_groups": [[0,1]]', '"tied_groups": [[0,2]]'))
    with pytest.raises(ScheduleError, match="stages 0 and 2 are on rank 0"):
        Program.from_csv(program.to_csv().replace("0REDUCE_TIED0", "0REDUCE_TIED0,2REDUCE_TIED0"))


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="drawn: the order cannot run to its end"):
        lowered("0F0 0B1 0F1 0B0\n1F0 1B0 1F1 1B1")


@st.composite
def requests(draw):
    """A random feasible schedule, tied groups of its stages, and whether to add the optimizer step."""
    schedule = draw(feasible_schedules())
    groups = draw(st.lists(st.sets(st.integers(0, schedule.num_stages - 1)), max_size=3))
    groups = [one_of_each_rank(schedule.placement, group) for group in groups]
    return schedule, groups, draw(st.booleans())


def assert_faithful(schedule, program):
    """The program computes what the schedule says, in its order, and moves each result that must move once."""
    assert computations(program) == computations(Program.from_schedule(schedule))
    rows = [row for rank in range(len(program)) for row in program[rank]]
    assert sorted(message(row) for row in rows if row.op.is_send) == crossings(schedule)
    assert sorted(message(row) for row in rows if row.op.is_receive) == crossings(schedule)


def assert_proved(schedule, **options):
    """What is made for a transport passes its proof, and ends on a plain machine of its model."""
    program = lower(schedule, **options)
    assert_faithful(schedule, program)
    assert_in_time(program)
    assert verdicts(program, DEFAULT_ORDER) == dict.fromkeys(DEFAULT_ORDER, "ends")
    for transport in DEFAULT_ORDER:
        assert check(program, transport).transports == (transport,)
    grouped = lower(schedule, transport="coalesced", **options)
    assert_faithful(schedule, grouped)
    assert_in_time(grouped)
    assert verdicts(grouped, MODELS) == dict.fromkeys(MODELS, "ends")
    assert check(grouped, "all").transports == (*DEFAULT_ORDER, "coalesced")


@given(request=requests())
def test_every_feasible_order_becomes_a_program_that_is_proved_under_its_transport(request):
    schedule, tied_groups, optimizer_step = request

    assert_proved(schedule, tied_groups=tied_groups, optimizer_step=optimizer_step)


@given(feasible_schedules())
def test_starts_that_are_known_change_nothing(schedule):
    start = whole_starts(walk_untimed(schedule, predecessors(schedule)))

    assert lower(schedule, start=start) == lower(schedule)


@pytest.mark.slow
@given(request=requests())
def test_the_program_is_the_same_compiled(request):
    schedule, tied_groups, optimizer_step = request
    options = {"tied_groups": tied_groups, "optimizer_step": optimizer_step}
    interpreted = [lower(schedule, transport, **options) for transport in ("posted", "coalesced")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)
        assert [lower(schedule, transport, **options) for transport in ("posted", "coalesced")] == interpreted


@pytest.mark.slow
@given(schedule=schedules())
def test_every_schedule_of_the_registry_becomes_a_program_that_is_proved_under_its_transport(schedule):
    assert_proved(schedule)


def test_for_groups_of_messages_both_ends_stand_where_the_maker_ends():
    program = lowered("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1", transport="coalesced")

    assert drawn(program) == lines(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD
        """
    )


def test_the_default_order_is_that_of_posted():
    schedule = build("1f1b", ranks=3, microbatches=4)

    assert lower(schedule) == lower(schedule, "posted") == lower(schedule, "rendezvous")
    assert lower(schedule, "all") == lower(schedule, "coalesced") != lower(schedule)
