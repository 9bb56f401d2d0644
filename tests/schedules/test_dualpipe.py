"""`dualpipe`: its placement, and what it refuses."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build


def test_half_of_the_microbatches_travels_each_way():
    schedule = build("dualpipe", ranks=4, microbatches=10)

    assert schedule.placement.routes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert schedule.placement.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.route_of_microbatch.tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        (3, 8, "ranks: dualpipe folds two directions onto an even number of ranks, got 3; use 4, or dualpipe-v"),
        (4, 9, "microbatches: dualpipe sends half of the microbatches each way, got 9; use 10"),
        (4, 6, "microbatches: dualpipe needs .* got 6 on 4 ranks; use 8 or more, or chimera"),
    ],
)
def test_what_does_not_fold_is_refused_with_a_fix(ranks, microbatches, told):
    with pytest.raises(ConfigError, match=told):
        build("dualpipe", ranks=ranks, microbatches=microbatches)
