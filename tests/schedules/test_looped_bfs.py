"""`looped-bfs`: its order as drawn, as recorded from other systems, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.schedules.timing import timeline


def test_one_stage_per_rank_is_gpipe():
    shape = {"ranks": 3, "microbatches": 4}
    schedule = build("looped-bfs", stages_per_rank=1, **shape)

    assert schedule.placement.style == "line"
    assert schedule == build("gpipe", **shape)


@pytest.mark.parametrize("backward_order", ["ascending", "descending"])
@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(2, 2, 4), (3, 3, 5), (4, 2, 4)])
def test_bubble_and_memory_are_those_promised(ranks, per_rank, microbatches, backward_order):
    options = {"stages_per_rank": per_rank, "backward_order": backward_order}

    found = timeline("looped-bfs", ranks, microbatches, (2, 3, 2), **options)

    assert found.makespan_s == pytest.approx((microbatches * per_rank + ranks - 1) * 7)
    assert found.peak_activations == [microbatches * per_rank] * ranks


@pytest.mark.feature("B7", "X38")
def test_the_order_is_what_pippy_runs_and_torch_backwards():
    assert_recorded("looped-bfs", "pippy", "LoopedBFS")
    assert_recorded("looped-bfs", "torch", "compute/LoopedBFS", lambda size: {"backward_order": "descending"})
