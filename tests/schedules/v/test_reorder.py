"""Reordering: drawn before and after, what it may never do, and the same compiled."""

from itertools import product

import numpy as np
import pytest

from penstock.ir import hot
from penstock.schedules.v import one_f_one_b_v, v_half, v_min, v_zb
from penstock.schedules.v.reorder import move_earlier, move_end_earlier, move_whole_earlier
from penstock.schedules.v.slots import (
    BACKWARDS,
    PASSES,
    Pass,
    fill_weights,
    repeat,
    squeeze,
    widen_backwards,
    without_weights,
)
from tests.schedules.v.tables import assert_table, most_held, table

SIZES = [(1, 3), (2, 1), (2, 12), (3, 2), (3, 7), (5, 3), (5, 12), (6, 1), (6, 7)]
SPLIT = [v_min.block, v_half.block, v_zb.block]


def split_tables(block, num_ranks, num_microbatches):
    """Before and after both steps of a split block."""
    repeated = fill_weights(repeat(block(num_ranks), num_microbatches))
    moved = move_earlier(repeated)
    started = without_weights(squeeze(moved))
    return [(repeated, moved), (started, move_end_earlier(started))]


def slots_of(slots, each):
    """[num_ranks, number] the slots in which each rank runs a pass."""
    return np.nonzero(slots == each)[1].reshape(len(slots), -1)


def peak(slots):
    """The most activations that a rank holds, with weight gradients in idle slots where they have none of their own."""
    return most_held(slots if (slots == Pass.WEIGHT).any() else fill_weights(slots))


def assert_possible(slots, length):
    """Each pass comes after what it waits for; backwards take `length` slots."""
    down, up, down_again, up_again = (slots_of(slots, each) for each in PASSES)
    assert (np.diff(down, axis=0) >= 1).all()
    assert (np.diff(up[::-1], axis=0) >= 1).all()
    assert (np.diff(down_again, axis=0) >= length).all()
    assert (np.diff(up_again[::-1], axis=0) >= length).all()
    assert (up[-1] > down[-1]).all()
    assert (down_again[0] > up[0]).all()
    assert (up_again[-1] >= down_again[-1] + length).all()


def assert_moved_well(before, after, *, length):
    """Nothing is lost, late or impossible, and no rank holds more than the one that held most."""
    assert_possible(after, length)
    for each in (*PASSES, Pass.WEIGHT):
        assert (slots_of(after, each) <= slots_of(before, each)).all()
    assert peak(after) <= peak(before)
    if (after == Pass.WEIGHT).any():
        begun = np.cumsum(np.isin(after, BACKWARDS), axis=1)
        assert (np.cumsum(after == Pass.WEIGHT, axis=1) <= begun).all()


def test_everything_before_the_first_backward_of_the_earlier_stage_moves_to_idle_slots():
    assert_table(move_earlier(table("F . . f . b . w . B w")), "F f b w . . . . . B w")


def test_a_forward_moves_no_further_than_memory_allows():
    assert_table(move_earlier(table("F f . b w . F B w f b w B w")), "F f b w F . . B w f b w B w")


def test_nothing_moves_past_what_it_waits_for_on_another_rank():
    before = """
        F . . . . f . b . . . . . B w w
        . . F . f . . . . b . B . w w .
        """

    assert_table(
        move_earlier(table(before)),
        """
        F . . f b . . . . . . . . B w w
        . F f . . b B . . . . . . w w .
        """,
    )


def test_a_whole_backward_moves_with_its_second_slot():
    assert_table(move_whole_earlier(table("F . f . b w . . B w")), "F f b w B w")


def test_at_the_end_idle_slots_run_the_weight_gradients_that_make_room_for_a_forward():
    assert_table(
        move_end_earlier(table("F f b . B . F f b B F . . f b . B")),
        "F f b . B . F f b B F . f b B",
    )


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
@pytest.mark.parametrize("block", SPLIT)
def test_a_split_block_stays_possible_and_within_its_memory(block, num_ranks, num_microbatches):
    for before, after in split_tables(block, num_ranks, num_microbatches):
        assert_moved_well(before, after, length=1)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_a_whole_block_stays_possible_and_within_its_memory(num_ranks, num_microbatches):
    before = widen_backwards(repeat(one_f_one_b_v.block(num_ranks), num_microbatches))

    assert_moved_well(before, move_whole_earlier(before), length=2)


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
