"""Reordering: drawn before and after, what it may never do, and the same compiled."""

from itertools import product

import pytest

from penstock.ir import hot
from penstock.schedules.v import one_f_one_b_v, v_half, v_min, v_zb
from penstock.schedules.v.reorder import move_earlier, move_end_earlier, move_whole_earlier
from penstock.schedules.v.slots import (
    fill_weights,
    repeat,
    squeeze,
    widen_backwards,
    without_weights,
)
from tests.schedules.v.tables import assert_table, table

SPLIT = [v_min.block, v_half.block, v_zb.block]


def split_tables(block, num_ranks, num_microbatches):
    """Before and after both steps of a split block."""
    repeated = fill_weights(repeat(block(num_ranks), num_microbatches))
    moved = move_earlier(repeated)
    started = without_weights(squeeze(moved))
    return [(repeated, moved), (started, move_end_earlier(started))]


def test_a_whole_backward_moves_with_its_second_slot():
    assert_table(move_whole_earlier(table("F . f . b w . . B w")), "F f b w B w")


def test_at_the_end_idle_slots_run_the_weight_gradients_that_make_room_for_a_forward():
    assert_table(
        move_end_earlier(table("F f b . B . F f b B F . . f b . B")),
        "F f b . B . F f b B F . f b B",
    )


@pytest.mark.slow
def test_compiled_it_moves_the_same(monkeypatch):
    whole = [widen_backwards(repeat(one_f_one_b_v.block(ranks), 9)) for ranks in (1, 4, 7)]
    interpreted = [pairs for block, ranks in product(SPLIT, (1, 4, 7)) for pairs in split_tables(block, ranks, 9)]
    interpreted += [(slots, move_whole_earlier(slots)) for slots in whole]

    monkeypatch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)
    compiled = [pairs for block, ranks in product(SPLIT, (1, 4, 7)) for pairs in split_tables(block, ranks, 9)]
    compiled += [(slots, move_whole_earlier(slots)) for slots in whole]

    for (_, expected), (_, actual) in zip(interpreted, compiled, strict=True):
        assert (actual == expected).all()
