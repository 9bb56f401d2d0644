"""`seq1f1b`: its order as recorded from another system, and its makespans and peaks by their formulas."""

from itertools import product

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded, orders
from tests.schedules.timing import timeline


def timed(ranks, microbatches, slices):
    """The timeline where the forward of a whole microbatch takes 4 s on a stage, and each part of its backward too."""
    return timeline("seq1f1b", ranks, microbatches, (4 / slices, 4 / slices, 4 / slices), slices=slices)


def test_one_slice_is_1f1b():
    for ranks, microbatches in product(range(1, 6), range(1, 9)):
        sliced, whole = (build(name, ranks=ranks, microbatches=microbatches) for name in ("seq1f1b", "1f1b"))
        assert orders(sliced) == orders(whole)


def test_the_order_is_that_of_the_zero_bubble_code():
    assert_recorded("seq1f1b", "zero_bubble", "seq1f1b", lambda size: {"slices": size["s"]})


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_bubble_and_memory_are_those_of_the_formulas(slices):
    for ranks, microbatches in product(range(1, 7), [1, 2, 5, 8]):
        found = timed(ranks, microbatches, slices)

        assert found.span_s == found.makespan_s == 12 * (microbatches + (ranks - 1) / slices)
        warm_ups = [ranks - rank - 1 + slices for rank in range(ranks)]
        assert found.peak_activations == [min(microbatches * slices, count) for count in warm_ups]
