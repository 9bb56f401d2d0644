"""Sequences of one source; batches of them are in test_data."""

import numpy as np
import pytest

from penstock.train.data.sequences import Source, Windows

TOKENS = np.arange(1001, dtype=np.uint16)


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 2)])
def test_neighbouring_windows_share_a_token(num_tokens, num_windows):
    windows = Windows(5, 5 + num_tokens, 10)

    assert [windows[index] for index in range(len(windows))] == [
        (5 + 10 * at, 16 + 10 * at) for at in range(num_windows)
    ]


def test_sources_of_one_size_and_seed_are_shuffled_otherwise():
    orders = [
        [Source(TOKENS, length=10, seed=3, number=number).train_span(at) for at in range(100)] for number in range(3)
    ]

    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
