"""Which source a sequence comes from."""

from itertools import pairwise

import pytest

from penstock.train.data.mixture import PATTERN_LENGTH, Mixture

WEIGHTS = [[1.0], [1.0, 1.0], [3.0, 1.0], [0.7, 0.2, 0.1], [1e-9, 1.0], [5.0, 5.0, 5.0, 5.0]]


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


def test_a_seed_chooses_the_pattern():
    orders = {
        tuple(Mixture([2.0, 1.0, 1.0], seed=seed).locate(sequence)[0] for sequence in range(40)) for seed in range(8)
    }

    assert len(orders) > 1
