"""Tables of slots: drawn before and after each step."""

import numpy as np
import pytest

from penstock.schedules.v.slots import (
    BACKWARDS,
    IDLE,
    Pass,
    fill_weights,
    fill_weights_by_stage,
    owed,
    pays,
    repeat,
    squeeze,
    to_orders,
)
from tests.schedules.v.tables import assert_table, table

BLOCK = np.array([[0, 3, 4, 7], [1, 2, 5, 6]])


def orders(drawing):
    return [order.tolist() for order in to_orders(table(drawing))]


def test_a_block_comes_again_every_six_slots():
    assert_table(
        repeat(BLOCK, 3),
        """
        F . . f b . F B . f b . F B . f b . . B
        . F f . . b B F f . . b B F f . . b B .
        """,
    )


def test_weight_gradients_fill_idle_slots_and_those_that_are_left_come_behind():
    assert_table(
        fill_weights(table("F . f b . b B . F . B\nF f b B F f")),
        """
        F . f b w b B w F w B w . .
        F f b B F f w w . . . . . .
        """,
    )


def test_weight_gradients_of_the_later_stage_go_first():
    assert_table(
        fill_weights_by_stage(table("F f B b . b . . F . B")),
        "F f B b o b o h F . B h",
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_is_owed_is_what_a_queue_holds(seed):
    slots = np.random.default_rng(seed).choice([IDLE, *Pass], size=(1, 30), p=[0.4, 0.05, 0.05, 0.2, 0.2, 0.1, 0, 0])
    free = slots == IDLE
    waiting, num_waiting, runs = 0, [], []
    for each in slots[0]:
        runs.append(bool(each == IDLE and waiting))
        waiting += int(each in BACKWARDS) - runs[-1]
        num_waiting.append(waiting)

    assert owed(slots, BACKWARDS, free).tolist() == [num_waiting]
    assert pays(slots, BACKWARDS, free).tolist() == [runs]


def test_squeezing_starts_all_as_early_as_the_rank_before_allows():
    before = """
        F . . . F . f b w . f b . w . B . w B w
        . F f . . F f . b w . . b w B w . B . w
        """

    assert_table(
        squeeze(table(before)),
        """
        F F . f b w f b w . . B w B w
        . F f F f b w . b w B w B w
        """,
    )


def test_a_table_of_whole_backwards_reads_without_their_second_slots():
    found = orders("F F f b w f b w B w B w")

    assert found == [[[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0], [1, 0, 1]]]
