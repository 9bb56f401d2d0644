"""`v-min`: its bubble."""

from itertools import product

import pytest

from tests.schedules.v.tables import bubble


@pytest.mark.slow
def test_bubble_is_that_of_the_formula():
    for ranks, more in product(range(2, 13), [1, 2, 3, 4, 13, 26]):
        assert bubble("v-min", ranks, ranks + more) == 4 * ranks - (7 if ranks % 3 == 0 else 5)
