"""`1f1b-v`: its bubble."""

import pytest

from tests.schedules.v.tables import bubble


@pytest.mark.slow
def test_bubble_is_at_most_five_sixths_of_that_of_1f1b():
    for ranks in range(1, 13):
        for microbatches in (ranks, 2 * ranks, 3 * ranks):
            assert bubble("1f1b-v", ranks, microbatches) <= 5 * (ranks - 1)
