"""`v-min`: its bubble."""

import pytest

from tests.schedules.v.tables import bubble


@pytest.mark.parametrize("ranks", [2, 3, 4, *(pytest.param(number, marks=pytest.mark.slow) for number in range(5, 13))])
def test_bubble_is_that_of_the_formula(ranks):
    for more in (1, 2, 3, 4, 13, 26):
        assert bubble("v-min", ranks, ranks + more) == 4 * ranks - (7 if ranks % 3 == 0 else 5)
