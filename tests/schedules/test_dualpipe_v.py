"""`dualpipe-v`: its order as drawn, and as recorded from torch."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.support.grids import assert_grid


def test_one_rank_overlaps_with_itself():
    assert_grid(
        build("dualpipe-v", ranks=1, microbatches=3),
        "0F0 1F0 0F1 1B0 (1F1;0B0) (0F2;1B1) (1F2;0B1) 1B2 0I2 0W2",
    )


@pytest.mark.feature("X38")
def test_the_order_is_that_of_torch():
    assert_recorded("dualpipe-v", "torch", "compute/DualPipeV")


def test_too_few_microbatches_are_refused_with_a_fix():
    with pytest.raises(ConfigError, match=r"microbatches: .* got 7 on 4 ranks; use 8 or more, or hanayo") as caught:
        build("dualpipe-v", ranks=4, microbatches=7)

    assert caught.value.key == "microbatches"
