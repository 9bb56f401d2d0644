"""The rule of `zb-h1` and `zb-h2`, run action after action as it is worded."""

from collections import Counter
from itertools import product

import pytest

from penstock.schedules import build
from tests.schedules.golden import orders


def step_by_step(rank, num_ranks, num_microbatches, depth):
    """One rank's order: a weight gradient follows `depth x rank` input gradients late."""
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


@pytest.mark.parametrize(("name", "depth"), [("zb-h1", 1), ("zb-h2", 2)])
def test_the_order_is_that_of_the_rule_step_by_step(name, depth):
    for ranks, microbatches in product(range(1, 9), [*range(1, 10), 14, 15, 17]):
        expected = [step_by_step(rank, ranks, microbatches, depth) for rank in range(ranks)]

        assert orders(build(name, ranks=ranks, microbatches=microbatches)) == expected
