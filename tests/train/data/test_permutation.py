"""The shuffle that answers in constant time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.permutation import permuted
from tests.work import lines_run


@given(size=st.integers(1, 300), seed=st.integers(0, 2**70))
def test_every_place_is_taken_once(size, seed):
    assert sorted(permuted(index, size, seed=seed) for index in range(size)) == list(range(size))


def test_seeds_give_unlike_orders():
    orders = {tuple(permuted(index, 8, seed=seed) for index in range(8)) for seed in range(200)}

    assert len(orders) > 190


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


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError):
        permuted(index, 5, seed=0)
