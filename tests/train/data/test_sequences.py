"""Sequences of a source, their shuffle, and which source each is from; batches of them are in test_data."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.sequences import PATTERN_LENGTH, Mixture, Source, Windows, permuted
from tests.support.work import lines_run

TOKENS = np.arange(1001, dtype=np.uint16)
WEIGHTS = [[1.0], [1.0, 1.0], [3.0, 1.0], [0.7, 0.2, 0.1], [1e-9, 1.0], [5.0, 5.0, 5.0, 5.0]]


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 2)])
def test_neighbouring_windows_share_a_token(num_tokens, num_windows):
    windows = Windows(5, 5 + num_tokens, 10)

    assert [windows[index] for index in range(len(windows))] == [
        ((5 + 10 * at, 16 + 10 * at),) for at in range(num_windows)
    ]


@given(size=st.integers(1, 300), seed=st.integers(0, 2**70))
def test_every_place_is_taken_once_and_an_index_outside_is_refused(size, seed):
    assert sorted(permuted(index, size, seed=seed) for index in range(size)) == list(range(size))
    for index in (-1, size):
        with pytest.raises(IndexError):
            permuted(index, size, seed=seed)


def test_sources_and_seeds_have_orders_and_patterns_of_their_own():
    sources = [Source(TOKENS, length=10, seed=3, number=number) for number in range(3)]
    orders = [[source.train_row(at) for at in range(100)] for source in sources]
    mixtures = [Mixture([2.0, 1.0, 1.0], seed=seed) for seed in range(8)]

    assert len(set(map(tuple, orders))) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len({tuple(mixture.locate(sequence)[0] for sequence in range(40)) for mixture in mixtures}) > 1


def test_every_place_is_about_as_likely_as_any_other():
    size, num_seeds = 5, 2000
    counts = [[0] * size for _ in range(size)]
    for seed in range(num_seeds):
        for index in range(size):
            counts[index][permuted(index, size, seed=seed)] += 1

    expected = num_seeds / size
    chi_square = sum((count - expected) ** 2 / expected for row in counts for count in row)

    assert chi_square < 45  # 16 degrees of freedom: exceeded once in 7,000 by chance


def test_a_place_of_a_huge_shuffle_takes_as_many_lines_as_one_of_a_small_shuffle():
    def num_lines(size):
        return lines_run(lambda: [permuted(index, size, seed=1) for index in range(100)])

    assert num_lines(10**12) < 1.2 * num_lines(10**3)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_the_sequences_of_a_source_are_numbered_in_order_without_gaps(weights, seed):
    mixture = Mixture(weights, seed=seed)
    numbers = [[] for _ in weights]

    for sequence in range(3 * PATTERN_LENGTH // 2):
        source, number = mixture.locate(sequence)
        numbers[source].append(number)

    assert all(found == list(range(len(found))) for found in numbers)
    assert list(map(len, numbers)) == mixture.counts(3 * PATTERN_LENGTH // 2)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_stretch_has_the_shares_of_the_weights(weights):
    mixture = Mixture(weights, seed=3)
    total = sum(weights)

    ends = [0, 10, 100, 4096, 70_000, 70_016]
    for begin, end in pairwise(ends):
        found = [after - before for before, after in zip(mixture.counts(begin), mixture.counts(end), strict=True)]
        assert all(
            abs(count - (end - begin) * weight / total) <= 2.01 for count, weight in zip(found, weights, strict=True)
        )
