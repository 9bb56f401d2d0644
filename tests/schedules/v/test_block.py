"""V schedules from a block: as recorded and published, in memory that the block alone decides."""

from itertools import product

import numpy as np
import pytest

from penstock.ir.live import peak_activations
from penstock.schedules import build
from penstock.schedules.v import one_f_one_b_v, v_half, v_min, v_zb
from penstock.schedules.v.slots import fill_weights, repeat, widen_backwards
from tests.schedules.docstrings import drawn
from tests.schedules.golden import assert_recorded
from tests.schedules.timing import published, timeline
from tests.schedules.v.tables import assert_table, bubble, most_held

SPLIT = {"v-min": v_min, "v-half": v_half, "v-zb": v_zb}
FAMILIES = {**SPLIT, "1f1b-v": one_f_one_b_v}
FAMILY_OF_RECORD = {"v_min": "v-min", "v_half": "v-half", "v1f1b": "1f1b-v"}
"""By the first word of the keys of the authors' orders."""

LIMITS = {
    "v-min": ((12, 14), lambda f, i, w: w >= max(2 * f - i, 2 * i - f)),
    "v-half": ((12, 14), lambda f, i, w: w + 2 * i >= 2 * f and w + 2 * f >= 2 * i),
    "v-zb": ((16, 20), lambda f, i, w: True),
    "1f1b-v": ((12, 14), lambda f, i, w: 2 * f <= i + w),
}
"""Few and many microbatches to compare, and whether costs of F, I and W are within the limits of the family."""


def with_weights(name, slots):
    """A table of the family's slots with those of its weight gradients."""
    return fill_weights(slots) if name in SPLIT else widen_backwards(slots)


@pytest.mark.parametrize("word", FAMILY_OF_RECORD)
def test_the_order_is_that_of_its_authors_scheduler_whatever_the_costs(word):
    assert_recorded(FAMILY_OF_RECORD[word], "zero_bubble", f"{word}/")


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    published("published_controllable_memory.json"),
    ids=lambda row: f"{row['schedule']} on {row['ranks']} ranks",
)
def test_bubble_and_memory_are_as_published(row):
    found = timeline(row["schedule"], row["ranks"], row["microbatches"])

    assert found.span_s - 6 * row["microbatches"] == row["bubble"]
    assert max(found.peak_activations) == row["peak_activations"]


@pytest.mark.parametrize(
    "costs",
    [pytest.param(each, marks=pytest.mark.slow if 4 in each else ()) for each in product([1, 2, 4], repeat=3)],
    ids=str,
)
@pytest.mark.parametrize("name", LIMITS)
def test_only_costs_beyond_the_limits_of_the_family_add_to_the_bubble_with_every_microbatch(name, costs):
    microbatches, are_within = LIMITS[name]

    few, many = (bubble(name, 4, number, costs) for number in microbatches)

    assert many >= few
    assert (many == few) == are_within(*costs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_is_the_one_that_the_docstring_draws(name):
    sizes, drawing = drawn(name, "Its block on")

    assert_table(with_weights(name, repeat(FAMILIES[name].block(sizes["ranks"]), 1)), drawing)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_slots_of_a_block_differ_modulo_six_on_every_rank(name):
    for ranks in range(1, 41):
        taken = FAMILIES[name].block(ranks)
        if name == "1f1b-v":
            taken = np.hstack([taken, taken[:, 2:] + 1])

        assert all(len(set(slots % 6)) == taken.shape[1] for slots in taken)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_rank_holds_more_than_the_repeated_block_does_on_some_rank(name):
    for ranks, microbatches in product(range(1, 7), [1, 2, 3, 5, 9]):
        slots = repeat(FAMILIES[name].block(ranks), microbatches)
        limit = most_held(with_weights(name, slots))

        assert max(peak_activations(build(name, ranks=ranks, microbatches=microbatches))) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("v-min", lambda ranks: 2 * ((ranks + 1) // 3) + 2),
        ("v-half", lambda ranks: 2 * (ranks // 2) + 2),
        ("v-zb", lambda ranks: 2 * ranks),
        ("1f1b-v", lambda ranks: 2 * (2 * ranks // 3) + 2),
    ],
)
def test_the_fullest_rank_holds_what_the_formula_says(name, most):
    for ranks in range(1, 13):
        for microbatches in {1, 2, ranks // 2 + 1, ranks, 2 * ranks + 1, 3 * ranks}:
            schedule = build(name, ranks=ranks, microbatches=microbatches)

            assert max(peak_activations(schedule)) == min(2 * microbatches, most(ranks))
