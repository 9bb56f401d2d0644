"""Balanced parts are as light as a search over all splits can make them, and never empty."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.balance import balance, lightest_split
from tests.support.splits import every_split
from tests.support.work import lines_run


def part_weights(weights, sizes):
    start, parts = 0, []
    for size in sizes:
        parts.append(math.fsum(weights[start : start + size]))
        start += size
    return parts


@st.composite
def cases(draw, weight):
    weights = draw(st.lists(weight, min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@pytest.mark.feature("0.1")
@given(case=cases(st.floats(0, 1e6)))
def test_the_heaviest_part_is_as_light_as_possible(case):
    weights, num_parts = case

    heaviest = max(part_weights(weights, balance(weights, num_parts)))

    best = min(max(part_weights(weights, sizes)) for sizes in every_split(len(weights), num_parts))
    assert heaviest == pytest.approx(best, rel=1e-8, abs=1e-8 * max(weights))


@given(case=cases(st.integers(0, 4)))
def test_of_equally_good_splits_the_most_even_with_longer_first_parts_is_taken(case):
    weights, num_parts = case

    splits = list(every_split(len(weights), num_parts))
    best = min(max(part_weights(weights, sizes)) for sizes in splits)
    equal = [sizes for sizes in splits if max(part_weights(weights, sizes)) == best]
    evenness = min(sum(size * size for size in sizes) for sizes in equal)
    expected = max(sizes for sizes in equal if sum(size * size for size in sizes) == evenness)

    assert balance(weights, num_parts) == expected


@pytest.mark.feature("0.1")
@given(num_weights=st.integers(1, 96), num_parts=st.integers(1, 16), weight=st.sampled_from([0, 0.1, 1, 1 / 3, 1e308]))
def test_even_weights_give_sizes_that_differ_by_at_most_one(num_weights, num_parts, weight):
    num_parts = min(num_parts, num_weights)
    small, longer = divmod(num_weights, num_parts)

    sizes = balance([weight] * num_weights, num_parts)

    assert sizes == (small + 1,) * longer + (small,) * (num_parts - longer)


def test_rounding_of_sums_does_not_beat_evenness():
    weights = [0.3 * count for count in (1, 2, 2, 3)]  # 0.3 + 0.6 + 0.6 and 0.6 + 0.9 differ in the last bits

    assert balance(weights, 2) == (2, 2)


def test_the_lines_that_run_grow_with_the_sum_of_layers_and_parts_and_not_with_their_product():
    def num_lines(num_layers, num_parts):
        return lines_run(lambda: balance([1.0 + index % 7 for index in range(num_layers)], num_parts))

    assert num_lines(400, 64) < 1.1 * 4 * num_lines(100, 16)


@pytest.mark.parametrize(
    ("weights", "num_parts", "told"),
    [
        *(([1.0, weight], 1, f"weight 1 is {weight}") for weight in (-1.0, math.nan, math.inf)),
        *(([1.0], num_parts, f"^{num_parts} parts") for num_parts in (0, -1)),
        ([1.0, 1.0], 3, "3 parts were asked for, but there are 2 weights"),
    ],
)
def test_weights_that_are_no_amounts_and_parts_that_cannot_be_are_refused(weights, num_parts, told):
    with pytest.raises(PartitionError, match=told):
        balance(weights, num_parts)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6))
def test_parts_with_tables_of_their_own_are_as_light_as_any_allowed_split(seed, num_weights, num_parts):
    chance = np.random.default_rng(seed)
    tables = chance.integers(0, 9, (num_parts, num_weights + 1, num_weights + 1)).astype(float)
    tables[chance.random(tables.shape) < 0.4] = np.inf
    heaviest = {}
    for split in every_split(num_weights, num_parts) if num_parts <= num_weights else ():
        ends = np.cumsum(split)
        heaviest[split] = max(table[end - size, end] for table, size, end in zip(tables, split, ends, strict=True))
    least = min(heaviest.values(), default=np.inf)

    found = lightest_split(list(tables))

    assert (found is None) == (least == np.inf)
    if found is not None:
        best = [split for split, weight in heaviest.items() if weight == least]
        assert found in best
        assert sum(size**2 for size in found) == min(sum(size**2 for size in split) for split in best)
