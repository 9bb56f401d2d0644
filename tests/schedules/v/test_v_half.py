"""`v-half`: its bubble."""

from itertools import product

import pytest

from tests.schedules.v.tables import bubble


@pytest.mark.slow
def test_bubble_is_that_of_the_formula():
    for ranks, more in product(range(3, 13), [2, 3, 4, 5, 13, 26]):
        assert bubble("v-half", ranks, ranks + more) == 3 * ranks - (7 if ranks % 2 == 0 else 4)
