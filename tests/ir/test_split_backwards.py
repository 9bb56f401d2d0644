"""Every whole backward becomes its two parts, one after the other; nothing else changes."""

import numpy as np
from hypothesis import given

from penstock.ir.action import Kind
from penstock.ir.split_backwards import with_split_backwards
from penstock.proofs import check
from penstock.schedules import build
from tests.support.grids import assert_grid
from tests.support.strategies import schedules


def test_parts_stand_where_the_whole_was():
    assert_grid(
        with_split_backwards(build("1f1b", ranks=2, microbatches=2)),
        """
        rank 0: 0F0 0F1 .   0I0 0W0 .   0I1 0W1
        rank 1: .   1F0 1I0 1W0 1F1 1I1 1W1
        """,
    )


def test_the_weight_part_of_an_overlapped_backward_follows_the_pair():
    schedule = build("dualpipe-v", ranks=2, microbatches=8)
    pairs = np.flatnonzero(schedule.joined)
    is_whole = schedule.kind[pairs + 1] == Kind.BACKWARD
    assert is_whole.any()

    found = with_split_backwards(schedule)

    first = np.flatnonzero(found.joined)[is_whole]
    assert (found.kind[first + 1] == Kind.BACKWARD_INPUT).all()
    assert (found.kind[first + 2] == Kind.BACKWARD_WEIGHT).all()


@given(schedules())
def test_any_schedule_can_still_run_and_keeps_its_order(schedule):
    found = with_split_backwards(schedule)

    check(found)
    assert not (found.kind == Kind.BACKWARD).any()
    kept = np.flatnonzero(found.kind != Kind.BACKWARD_WEIGHT)
    before = np.flatnonzero(schedule.kind != Kind.BACKWARD_WEIGHT)
    for name in ("stage", "microbatch", "slice"):
        assert getattr(found, name)[kept].tolist() == getattr(schedule, name)[before].tolist()
