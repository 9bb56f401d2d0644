"""`breadth-depth`: its order as drawn, as recorded from Fast-LLM, its bubble and its memory."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build
from tests.schedules.golden import orders, recorded, sizes
from tests.schedules.timing import timeline
from tests.support.grids import assert_grid


def grid_of(key, forward_only=False):
    """The schedule at the size that a key of Fast-LLM names."""
    found = sizes(key)
    return build(
        "breadth-depth",
        ranks=found["p"],
        stages=found["S"],
        microbatches=found["df"] * found["bf"],
        breadth=found["bf"],
        depth=found["df"],
        slices=found["ms"],
        forward_only=forward_only,
    )


def text_of(schedule):
    """The orders of a schedule, its slices named as recorded ones are: always, where there is more than one."""
    texts = orders(schedule)
    if schedule.num_slices == 1:
        return texts
    return [" ".join(word if "." in word else f"{word}.0" for word in text.split()) for text in texts]


def test_without_options_it_is_looped_bfs():
    shape = {"ranks": 3, "microbatches": 5}

    assert build("breadth-depth", **shape) == build("looped-bfs", **shape)


@pytest.mark.parametrize("options", [{"breadth": 3}, {"depth": 2}, {"breadth": 3, "depth": 2}])
def test_groups_differ_where_they_do_not_divide(options):
    assert_grid(
        build("breadth-depth", ranks=1, microbatches=5, stages_per_rank=1, **options),
        "0F0 0F2 0F4 0B0 0B2 0B4 0F1 0F3 0B1 0B3",
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"depth": 6}, "depth: 6 groups for 5 microbatches leave some empty; give 5 or less"),
        ({"breadth": 2, "depth": 2}, r"breadth: breadth 2 x depth 2 does not make 5 .* give one of the two, or"),
        ({"breadth": 5, "depth": 2}, "breadth: breadth 5 x depth 2 does not make 5 microbatches"),
        ({"microbatches": 1, "breadth": 2, "depth": 1}, "breadth 2 x depth 1 does not make 1 microbatch;"),
    ],
)
def test_groups_that_do_not_make_the_microbatches_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        build("breadth-depth", **{"ranks": 2, "microbatches": 5} | options)


@pytest.mark.parametrize(("depth", "slices"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 3)])
def test_bubble_and_memory_are_those_promised(depth, slices):
    found = timeline("breadth-depth", 3, 12, (2, 3, 2), depth=depth, slices=slices)

    assert found.makespan_s == pytest.approx((12 * 2 * slices + depth * 2) * 7)
    assert found.peak_activations == [12 // depth * 2 * slices] * 3


@pytest.mark.feature("B8")
@pytest.mark.parametrize(("key", "ranks"), recorded("fast_llm", "train/"))
def test_the_order_is_that_of_fast_llm(key, ranks):
    """Where the first stages are frozen, Fast-LLM leaves out their backwards; the rest keeps its order."""
    frozen = tuple(f"{stage}B" for stage in range(sizes(key).get("frozen", 0)))

    kept = [[word for word in text.split() if not word.startswith(frozen)] for text in text_of(grid_of(key))]
    assert kept == [text.split() for text in ranks]


@pytest.mark.parametrize(("key", "ranks"), recorded("fast_llm", "eval/"))
def test_the_forwards_are_those_of_fast_llm(key, ranks):
    assert text_of(grid_of(key, forward_only=True)) == ranks
