"""Phases: how microbatches are counted, and which phases are refused."""

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.schedules.phases import b, f, i, pair, phases, repeat, w

FAR = f(1, first=3), b(1, first=3)
ORDERS = {
    "forwards and backwards of a stage are counted apart": (
        lambda: phases(repeat(2, f(3)), repeat(1, f(3), b(3)), repeat(2, b(3))), "3F0 3F1 3F2 3B0 3B1 3B2",
    ),
    "each stage has counts of its own": (
        lambda: phases(repeat(2, f(0), f(7)), repeat(2, b(7), b(0))), "0F0 7F0 0F1 7F1 7B0 0B0 7B1 0B1",
    ),
    "an action may stand in a phase more than once": (
        lambda: phases(repeat(2, f(0), f(0), b(0)), repeat(2, b(0))), "0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3",
    ),
    "whole and split backwards share a count": (
        lambda: phases(repeat(4, f(0)), repeat(1, b(0)), repeat(2, i(0)), repeat(1, b(0)), repeat(2, w(0))),
        "0F0 0F1 0F2 0F3 0B0 0I1 0I2 0B3 0W1 0W2",
    ),
    "a count can begin at another microbatch": (
        lambda: phases(repeat(2, *FAR), repeat(1, *FAR)), "1F3 1B3 1F4 1B4 1F5 1B5",
    ),
    "a count goes on where it is": (lambda: phases(repeat(1, *FAR), repeat(1, f(1), b(1))), "1F3 1B3 1F4 1B4"),
    "what is numbered beyond the microbatches is dropped": (
        lambda: phases(repeat(3, f(0)), repeat(2, f(0), i(0), w(0)), microbatches=2), "0F0 0F1 0I0 0W0 0I1 0W1",
    ),
    "microbatches beyond are dropped with all their slices": (
        lambda: phases(repeat(4, f(0), b(0)), microbatches=1, slices=2), "0F0 0B0.1 0F0.1 0B0",
    ),
    "backwards can be numbered from the last": (
        lambda: phases(repeat(3, f(0)), repeat(3, f(1, first=3)), repeat(3, b(1, first=3), b(0)), order="descending"),
        "0F0 0F1 0F2 1F3 1F4 1F5 1B5 0B2 1B4 0B1 1B3 0B0",
    ),
    "slices come back from the last": (
        lambda: phases(repeat(4, f(0)), repeat(4, b(0)), slices=2), "0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1",
    ),
    "slices of microbatches that come back from the last do, too": (
        lambda: phases(repeat(4, f(0)), repeat(4, b(0)), slices=2, order="descending"),
        "0F0 0F0.1 0F1 0F1.1 0B1.1 0B1 0B0.1 0B0",
    ),
    "slices of split backwards have their weight gradients": (
        lambda: phases(repeat(2, f(0, first=1), i(0, first=1)), repeat(2, w(0)), slices=2),
        "0F1 0I1.1 0F1.1 0I1 0W1.1 0W1",
    ),
    "what is repeated no times is not there": (lambda: phases(repeat(0, f(5), w(4)), repeat(1, f(0))), "0F0"),
    "numbers may be those of numpy": (lambda: phases(repeat(np.int64(2), f(0))), "0F0 0F1"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "text"), ORDERS.values(), ids=ORDERS)
def test_phases_number_their_actions(make, text):
    assert str(make()) == text


def test_a_weight_gradient_is_of_the_oldest_input_gradient_of_its_stage_or_of_the_rank():
    inputs = (repeat(2, f(0), f(1)), repeat(1, i(1)), repeat(2, i(0)), repeat(1, i(1)))

    of_stages = phases(*inputs, repeat(2, w(0)), repeat(2, w(1)))
    of_rank = phases(*inputs, repeat(4, w()))

    assert str(of_stages).endswith("1I0 0I0 0I1 1I1 0W0 0W1 1W0 1W1")
    assert str(of_rank).endswith("1I0 0I0 0I1 1I1 1W0 0W0 0W1 1W1")


def test_pairs_overlap():
    order = phases(repeat(1, f(0)), repeat(1, pair(f(0), b(0)), b(0)))

    assert str(order) == "0F0 (0F1;0B0) 0B1"
    assert order.joined.tolist() == [False, True, False, False]


@pytest.mark.parametrize(("microbatches", "left"), [(1, "0F0 1F0 0B0 1B0"), (2, "0F0 1F0 (0B0;0F1) 1F1 0B1 1B0 1B1")])
def test_half_of_a_pair_that_is_left_does_not_overlap_what_follows(microbatches, left):
    order = phases(
        repeat(1, f(0), f(1)),
        repeat(1, pair(b(0), f(0)), f(1)),
        repeat(1, b(0)),
        repeat(2, b(1)),
        microbatches=microbatches,
    )

    assert str(order) == left


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([repeat(3, f(2)), repeat(2, b(2))], r"stage 2 runs forward on 0 to 2 and backward on 0 to 1; .* once in both"),
        ([repeat(2, f(0), b(0)), repeat(2, f(1))], "stage 1 runs forward on 0 to 1 and backward on none; expected"),
        ([repeat(2, b(1))], "stage 1 runs forward on none and backward on 0 to 1; expected"),
        (
            [repeat(3, f(0, first=0)), repeat(2, f(0, first=2)), repeat(5, b(0))],
            "stage 0 counts from 0 and again from 2, which runs something twice or never; expected one first",
        ),
        ([repeat(3, f(0, first=2)), repeat(3, b(0))], "stage 0 runs forward on 2 to 4 and backward on 0 to 2"),
        ([repeat(4, f(0), i(0)), repeat(3, w(0))], "stage 0 has 4 input gradients and 3 weight gradients; expected"),
        ([repeat(2, f(0), b(0), w(0))], "stage 0 has 0 input gradients and 2 weight gradients"),
        ([repeat(2, f(0), i(0)), repeat(1, w())], "the rank has 2 input gradients and 1 weight gradient; expected"),
        ([repeat(2, f(0), i(0)), repeat(1, w(), w(0))], r"w\(\) and w\(stage\) on one rank; expected one of them"),
        ([f(0)], r"PhaseAction\(.* of type PhaseAction; expected phases such as repeat\(1, f\(0\)\)"),
    ],
)
def test_phases_that_compute_something_twice_or_never_are_refused(parts, told):
    with pytest.raises(ScheduleError, match=f"^phases: {told}") as caught:
        phases(*parts)

    assert "\n" not in str(caught.value)


def test_refused_slices_are_told_as_slices():
    with pytest.raises(
        ScheduleError, match="stage 0 runs forward on 0 to 3 and backward on 0 to 2; expected each slice"
    ):
        phases(repeat(4, f(0)), repeat(3, b(0)), slices=2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: repeat(1.5, f(0)), "repeat: times: 1.5 of type float; expected a whole number"),
        (lambda: phases(repeat(1, f("a"), b("a"))), "phases: the stage: 'a' of type str; expected a whole number of 0"),
        (lambda: phases(repeat(1, f(-1), b(-1))), "phases: the stage: -1 of type int; expected a whole number of 0"),
        (lambda: phases(repeat(1, f(0, first=-1), b(0, first=-1))), "phases: first: -1 of type int; expected"),
        (lambda: phases(repeat(1, f(0), b(0)), microbatches="2"), "phases: microbatches: '2' of type str; expected"),
        (lambda: phases(repeat(1, f(0), b(0)), slices=0), "phases: slices: 0 of type int; .* whole number of 1"),
    ],
)
def test_what_is_no_number_is_refused_by_name(make, told):
    with pytest.raises(ScheduleError, match=f"^{told}"):
        make()


@pytest.mark.parametrize("members", [(1, 2), (f(0), 2), (f, b(0))])
def test_what_is_no_pair_of_actions_is_refused(members):
    with pytest.raises(ScheduleError, match=r"^pair: .*; expected two actions such as f\(0\) and b\(1\)$"):
        pair(*members)


def test_an_unknown_order_is_refused():
    with pytest.raises(ScheduleError, match="order='down'; expected 'ascending' or 'descending'"):
        phases(repeat(1, f(0)), order="down")


@pytest.mark.parametrize(
    ("times", "action", "told"),
    [(-1, f(0), r"repeat\(-1, ...\): expected 0 times or more"), (1, f, "of type function; expected actions such as")],
)
def test_what_cannot_be_repeated_is_refused(times, action, told):
    with pytest.raises(ScheduleError, match=told):
        repeat(times, action)
