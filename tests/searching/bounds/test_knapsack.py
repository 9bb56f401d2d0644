"""The most work that fits into a room."""

import itertools

import numpy as np
import pytest

from penstock.searching.bounds.knapsack import most_seconds


def test_pieces_without_a_size_fit_any_room_and_nothing_fits_less_than_none():
    assert most_seconds([(0, 1.0, 2), (4, 3.0, 2)], 7) == 2.0 + 3.0
    assert most_seconds([(0, 1.0, 2), (4, 3.0, 2)], -1) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_trying_all_gives_and_not_less_with_more_sizes(seed):
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 9)) for _ in range(3)]
    sizes[2] = sizes[seed % 3]  # with seed 2, 5, ... there are 3 sizes
    kinds = [(size, float(random.integers(0, 7)), int(random.integers(0, 4))) for size in sizes]
    room = int(random.integers(0, 25))

    found = most_seconds(kinds, room)

    numbers = itertools.product(*(range(count + 1) for *_, count in kinds))
    fit = [each for each in numbers if sum(n * size for n, (size, *_) in zip(each, kinds, strict=True)) <= room]
    best = max(sum(n * seconds for n, (_, seconds, _) in zip(each, kinds, strict=True)) for each in fit)
    assert found >= best
    if len({size for size, seconds, count in kinds if seconds and count}) <= 2:
        assert found == best
