"""Balanced parts are as light as a search over all splits can make them, and never empty."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.balance import balance, lightest_split
from tests.support.work import lines_run


def part_weights(weights, sizes):
    start, parts = 0, []
    for size in sizes:
        parts.append(math.fsum(weights[start : start + size]))
        start += size
    return parts


def all_splits(num_weights, num_parts):
    for cuts in combinations(range(1, num_weights), num_parts - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_weights)))


@st.composite
def cases(draw, weight):
    weights = draw(st.lists(weight, min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@pytest.mark.feature("0.1")
@given(case=cases(st.floats(0, 1e6)))
def test_parts_cover_everything_and_none_is_empty(case):
    weights, num_parts = case

    sizes = balance(weights, num_parts)

    assert len(sizes) == num_parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1


@pytest.mark.feature("0.1")
@given(case=cases(st.floats(0, 1e6)))
def test_the_heaviest_part_is_as_light_as_possible(case):
    weights, num_parts = case

    heaviest = max(part_weights(weights, balance(weights, num_parts)))

    best = min(max(part_weights(weights, sizes)) for sizes in all_splits(len(weights), num_parts))
    assert heaviest == pytest.approx(best, rel=1e-8, abs=1e-8 * max(weights))


@given(case=cases(st.integers(0, 4)))
def test_of_equally_good_splits_the_most_even_with_longer_first_parts_is_taken(case):
    weights, num_parts = case

    splits = list(all_splits(len(weights), num_parts))
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


@pytest.mark.feature("F1", "X37")
def test_a_light_embedding_and_a_heavy_head_shift_the_cuts():
    weights = [0.0, *[1.0] * 8, 0.0, 2.0]  # embedding, blocks, norm, head

    assert balance(weights, 2) == (6, 5)
    assert balance(weights, 5) == (3, 2, 2, 2, 2)


def test_rounding_of_sums_does_not_beat_evenness():
    weights = [0.3 * count for count in (1, 2, 2, 3)]  # 0.3 + 0.6 + 0.6 and 0.6 + 0.9 differ in the last bits

    assert balance(weights, 2) == (2, 2)


def test_the_lines_that_run_grow_with_the_sum_of_layers_and_parts_and_not_with_their_product():
    def num_lines(num_layers, num_parts):
        return lines_run(lambda: balance([1.0 + index % 7 for index in range(num_layers)], num_parts))

    assert num_lines(400, 64) < 1.1 * 4 * num_lines(100, 16)


@pytest.mark.parametrize("num_parts", [0, -1])
def test_less_than_one_part_is_refused(num_parts):
    with pytest.raises(PartitionError, match=f"^{num_parts} parts"):
        balance([1.0], num_parts)


def test_more_parts_than_weights_are_refused():
    with pytest.raises(PartitionError, match="3 parts were asked for, but there are 2 weights"):
        balance([1.0, 1.0], 3)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_amount_is_refused(weight):
    with pytest.raises(PartitionError, match=f"weight 1 is {weight}"):
        balance([1.0, weight], 1)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6))
def test_parts_with_tables_of_their_own_are_as_light_as_any_allowed_split(seed, num_weights, num_parts):
    chance = np.random.default_rng(seed)
    tables = chance.integers(0, 9, (num_parts, num_weights + 1, num_weights + 1)).astype(float)
    tables[chance.random(tables.shape) < 0.4] = np.inf
    heaviest = {}
    for split in all_splits(num_weights, num_parts) if num_parts <= num_weights else ():
        ends = np.cumsum(split)
        heaviest[split] = max(table[end - size, end] for table, size, end in zip(tables, split, ends, strict=True))
    least = min(heaviest.values(), default=np.inf)

    found = lightest_split(list(tables))

    assert (found is None) == (least == np.inf)
    if found is not None:
        best = [split for split, weight in heaviest.items() if weight == least]
        assert found in best
        assert sum(size**2 for size in found) == min(sum(size**2 for size in split) for split in best)
