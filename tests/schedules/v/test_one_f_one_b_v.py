"""`1f1b-v`: its bubble."""

import pytest

from tests.schedules.v.tables import bubble


@pytest.mark.parametrize("ranks", [1, 2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 13))])
def test_bubble_is_at_most_five_sixths_of_that_of_1f1b(ranks):
    for microbatches in (ranks, 2 * ranks, 3 * ranks):
        assert bubble("1f1b-v", ranks, microbatches) <= 5 * (ranks - 1)
