"""The rule of `zb-h1` and `zb-h2`: the positions that are counted are those that running it step by step gives."""

from collections import Counter
from itertools import product

import pytest

from penstock.planning import prove_and_lower
from penstock.schedules.delayed_weights import delayed_weights
from penstock.schedules.family import Shape
from tests.grids import assert_grid
from tests.schedules.golden import orders

SIZES = list(product(range(1, 9), [*range(1, 10), 14, 15, 17]))


def made(num_ranks, num_microbatches, *, depth, is_forward_only=False, **options):
    shape = Shape(num_ranks, num_ranks, num_microbatches, 1, is_forward_only)
    return delayed_weights("delayed", shape, depth=depth, **options)


def step_by_step(rank, num_ranks, num_microbatches, depth):
    """One rank's order, action after action, as the rule is worded."""
    num_done, order = Counter(), []

    def run(letter):
        order.append(f"{rank}{letter}{num_done[letter]}")
        num_done[letter] += 1

    while num_done["F"] < min(num_microbatches, depth * (num_ranks - rank - 1)):
        run("F")
    while num_done["F"] < num_microbatches:
        run("F")
        run("I")
        if num_done["I"] > depth * rank:
            run("W")
    while num_done["I"] < num_microbatches:
        run("I")
        run("W")
    while num_done["W"] < num_microbatches:
        run("W")
    return " ".join(order)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_order_is_that_of_the_rule_step_by_step(depth):
    for num_ranks, num_microbatches in SIZES:
        expected = [step_by_step(rank, num_ranks, num_microbatches, depth) for rank in range(num_ranks)]

        assert orders(made(num_ranks, num_microbatches, depth=depth)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("joins_backwards", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_size_is_proved(depth, joins_backwards):
    for num_ranks, num_microbatches in SIZES:
        prove_and_lower(made(num_ranks, num_microbatches, depth=depth, joins_backwards=joins_backwards))


def test_joined_backwards_leave_the_held_back_and_the_last_ones_in_two_parts():
    assert_grid(
        made(3, 6, depth=2, joins_backwards=True),
        """
        0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1I0 1F3 1I1 1F4 1B2 1F5 1I3 1W0 1I4 1W1 1I5 1W3 1W4 1W5
        2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2B4 2F5 2I5 2W0 2W1 2W2 2W3 2W5
        """,
    )


def test_forward_only_has_the_forwards_alone():
    assert_grid(made(2, 3, depth=2, is_forward_only=True), "0F0 0F1 0F2\n1F0 1F1 1F2")
