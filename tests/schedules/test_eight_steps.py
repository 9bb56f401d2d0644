"""The eight steps: what one rank runs between its near stage 0 and its far stage 9."""

import pytest

from penstock.ir.action import Action, Kind
from penstock.schedules import FAMILIES, Shape
from penstock.schedules.eight_steps import Side, eight_steps

NEAR, FAR = Side(0), Side(9, 20)
DUALPIPE = FAMILIES["dualpipe"]


def words(order):
    """The actions of an order, each first of a pair with a + behind it."""
    return [
        str(Action(Kind(kind), stage, microbatch)) + "+" * joined
        for (kind, stage, microbatch), joined in zip(order.rows.tolist(), order.joined.tolist(), strict=True)
    ]


def test_a_rank_before_the_fold_runs_all_eight_steps():
    order = eight_steps(NEAR, FAR, outer=1, inner=2, num_microbatches=6)

    steps = [
        "0F0 0F1",
        "0F2 9F20 0F3 9F21",
        "9I20 9W20 9F22",
        "0F4+ 9B21 9F23+ 0B0 0F5+ 9B22 9F24+ 0B1",
        "9B23 9F25+ 0B2",
        "9B24 0B3 9I25 0I4",
        "9W25 0I5",
        "0W4 0W5",
    ]
    assert words(order) == " ".join(steps).split()


def test_at_the_fold_the_first_forward_and_backward_are_not_overlapped():
    order = eight_steps(NEAR, FAR, outer=0, inner=2, num_microbatches=4)

    steps = [
        "0F0 9F20 0F1 9F21",
        "0F2 9B20 9F22+ 0B0 0F3+ 9B21 9F23+ 0B1",
        "9B22 0B2 9I23 0I3",
        "9W23 0W3",
    ]
    assert words(order) == " ".join(steps).split()


@pytest.mark.parametrize("inner", [1, 2, 3, 4])
def test_the_later_half_of_the_last_backwards_is_split(inner):
    order = eight_steps(NEAR, FAR, outer=0, inner=inner, num_microbatches=2 * inner)

    last = words(order)[-3 * inner : -inner]
    assert ["I" in word for word in last] == [False] * inner + [True] * inner


def test_more_microbatches_make_the_steady_state_longer():
    short = eight_steps(NEAR, FAR, outer=2, inner=1, num_microbatches=6)
    long = eight_steps(NEAR, FAR, outer=2, inner=1, num_microbatches=16)

    assert len(long.rows) - len(short.rows) == 10 * 4
    assert int(long.joined.sum()) - int(short.joined.sum()) == 10 * 2


def test_pairs_and_backwards_are_left_out_where_nobody_asks_for_them():
    order = eight_steps(NEAR, FAR, outer=1, inner=1, num_microbatches=4)
    training, evaluation = Shape(4, 8, 8, 1, False), Shape(4, 8, 8, 1, True)
    by_default, apart = DUALPIPE.read_options({}), DUALPIPE.read_options({"overlap": False})

    assert order.as_asked(training, by_default) is order
    assert words(order.as_asked(training, apart)) == [word.rstrip("+") for word in words(order)]
    forwards = [word.rstrip("+") for word in words(order) if "F" in word]
    assert words(order.as_asked(evaluation, by_default)) == forwards
