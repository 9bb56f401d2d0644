"""`looped-bfs`: its order as drawn, as recorded from other systems, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.schedules.docstrings import assert_drawn
from tests.schedules.golden import built, recorded
from tests.schedules.timing import timeline


@pytest.mark.feature("B7")
def test_all_microbatches_run_on_a_stage_before_the_next():
    assert_drawn("looped-bfs")


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


@pytest.mark.feature("X38")
@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "compute/LoopedBFS"))
def test_the_descending_order_is_that_of_torch(key, ranks):
    assert built("looped-bfs", key, backward_order="descending") == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("pippy", "LoopedBFS"))
def test_the_order_is_what_pippy_runs(key, ranks):
    assert built("looped-bfs", key) == ranks
