"""Tables of slots: drawn before and after each step."""

from penstock.schedules.v.slots import (
    fill_weights,
    fill_weights_by_stage,
    to_orders,
)
from tests.schedules.v.tables import assert_table, table


def orders(drawing):
    return [order.tolist() for order in to_orders(table(drawing))]


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


def test_a_table_of_whole_backwards_reads_without_their_second_slots():
    found = orders("F F f b w f b w B w B w")

    assert found == [[[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0], [1, 0, 1]]]
