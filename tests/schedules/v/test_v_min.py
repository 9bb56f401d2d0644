"""`v-min`: its order and its block as drawn, and its bubble."""

from itertools import product

import pytest

from penstock.schedules import build
from penstock.schedules.v.slots import fill_weights, repeat
from penstock.schedules.v.v_min import block
from tests.grids import assert_grid
from tests.schedules.v.tables import assert_table, bubble


def test_four_ranks_as_in_its_docstring():
    schedule = build("v-min", ranks=4, microbatches=4)

    assert schedule.placement.style == "v"
    assert_grid(
        schedule,
        """
        0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 0F3 7F2 7I2 0I1 7W2 0W1 7F3 7I3 0I2 7W3 0W2 0I3 0W3
        1F0 1F1 6F0 6F1 6I0 6W0 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1I2 6I3 6W3 1W2 1I3 1W3
        2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5F2 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2W2 5I3 5W3 2I3 2W3
        3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3
        """,
    )


def test_its_block_as_in_its_docstring():
    assert_table(
        fill_weights(repeat(block(4), 1)),
        """
        rank 0:  F  .  .  .  .  .  .  f  b  w  .  .  .  .  .  B  w
        rank 1:  .  F  .  .  .  .  f  .  .  b  w  .  .  .  B  w
        rank 2:  .  .  F  .  .  f  .  .  .  .  b  w  .  B  w
        rank 3:  .  .  .  F  f  .  .  .  .  .  .  b  B  w  w
        """,
    )


@pytest.mark.slow
def test_bubble_is_that_of_the_formula():
    for ranks, more in product(range(2, 13), [1, 2, 3, 4, 13, 26]):
        assert bubble("v-min", ranks, ranks + more) == 4 * ranks - (7 if ranks % 3 == 0 else 5)
