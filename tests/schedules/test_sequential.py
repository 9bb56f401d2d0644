"""`sequential`: its order as drawn, and as recorded from another system."""

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.support.grids import assert_grid


def test_one_microbatch_goes_through_all_ranks_before_the_next():
    assert_grid(
        build("sequential", ranks=3, microbatches=2),
        """
        0F0 .   .   .   .   .   .   0B0 =   0F1 .   .   .   .   .   .   0B1 =
        .   1F0 .   .   .   1B0 =   .   .   .   1F1 .   .   .   1B1 =
        .   .   2F0 2B0 =   .   .   .   .   .   .   2F1 2B1 =
        """,
    )


@pytest.mark.feature("B1")
def test_one_rank_does_what_megatron_does_without_pipelining():
    assert_recorded("sequential", "megatron", "no_pipelining/train")
    assert_recorded("sequential", "megatron", "no_pipelining/fwd", lambda size: {"forward_only": True})
