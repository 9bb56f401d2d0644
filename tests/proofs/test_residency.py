"""Residency: how many stages of a rank are whole at once, and where that is more than may be."""

import pytest

from penstock.errors import ScheduleError
from penstock.lowering import assign_slots, lower
from penstock.proofs import check
from penstock.schedules import build
from tests.simulation.drawing import sharded as without_slots

TWO = "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD"


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


def test_each_rank_is_counted_by_itself_and_a_stage_that_stays_whole_counts_to_the_end():
    program = sharded(
        "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", "1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    )

    assert check(program, residency=1).peak_whole == [1, 1]


def test_a_stage_that_is_never_gathered_does_not_count():
    program = sharded("0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD")

    assert check(program, residency=1).peak_whole == [1]
