"""Properties that families share: orders as drawn, proofs of every size and its forwards, work; both DualPipes."""

import pytest

from penstock.placement import Placement
from penstock.planning import prove_and_lower
from penstock.schedules import FAMILIES, build
from tests.schedules.docstrings import assert_drawn
from tests.schedules.golden import assert_recorded
from tests.schedules.timing import bubble, published, timeline
from tests.support.work import lines_run

ANY_RANKS, ANY_MICROBATCHES = (1, 2, 3, 5, 8), [1, 2, 3, 5, 8, 12]
PROVED = {
    "seq1f1b": (ANY_RANKS, ANY_MICROBATCHES, [{"slices": slices} for slices in (1, 2, 3, 4)]),
    "zb-h1": (ANY_RANKS, ANY_MICROBATCHES, [{"backward": "split"}, {"backward": "whole"}]),
    "zb-h2": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "zbv": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "v-min": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "v-half": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "v-zb": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "1f1b-v": (ANY_RANKS, ANY_MICROBATCHES, [{}]),
    "dualpipe": ([6], [12, 16, 26], [{}, {"overlap": False}]),
    "dualpipe-v": ([5], [10, 11, 17], [{}, {"overlap": False}]),
    "chimera": ([6], [2, 4, 8, 14], [{}]),
    "hanayo": ([3], [1, 2, 4, 7], [{"waves": waves} for waves in (1, 2, 3)]),
}
"""Ranks, microbatches and options of each family; the shapes are all their combinations."""

BY_PHASES = ["1f1b", "zb-h1", "zbv", "dualpipe"]
BY_TURNS = ["interleaved-1f1b", "interleaved-zb", "group-interleaved"]


@pytest.mark.feature("0.16", "B2", "B3", "B5", "B7")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "sequential"])
def test_the_order_is_the_one_that_the_docstring_draws(name):
    assert_drawn(name)


@pytest.mark.parametrize("name", ["zbv", "v-min", "v-half", "v-zb", "1f1b-v", "dualpipe-v"])
def test_a_v_is_placed_as_one(name):
    assert build(name, ranks=3, microbatches=6).placement == Placement.vee(3)


@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        pytest.param(name, number, each, marks=pytest.mark.slow if place % 2 else ())
        for name, (_, numbers, options) in PROVED.items()
        for place, number in enumerate(numbers)
        for each in options
    ],
    ids=str,
)
def test_every_size_is_proved_and_its_forwards_alone_keep_their_order(name, microbatches, options):
    all_ranks, _, _ = PROVED[name]
    for ranks in all_ranks:
        trained = build(name, ranks=ranks, microbatches=microbatches, **options)
        forwards = build(name, ranks=ranks, microbatches=microbatches, forward_only=True, **options)

        assert forwards == trained.forward_only()
        for schedule in (trained, forwards):
            prove_and_lower(schedule)


@pytest.mark.parametrize("name", [*BY_PHASES, *BY_TURNS])
def test_the_lines_that_run_to_make_a_schedule_grow_with_ranks_and_not_with_microbatches(name):
    def num_lines(ranks, microbatches):
        return lines_run(lambda: build(name, ranks=ranks, microbatches=microbatches))

    assert num_lines(16, 256) < 1.1 * num_lines(16, 64)
    assert num_lines(32, 64) < 1.1 * 2 * num_lines(16, 64)


@pytest.mark.parametrize(("recorded_class", "name"), [("DualPipe/", "dualpipe"), ("DualPipeV/", "dualpipe-v")])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("train/", {}), ("train_nooverlap/", {"overlap": False}), ("forward_only/", {"forward_only": True})],
)
def test_the_orders_of_both_dualpipes_are_those_of_their_repository(recorded_class, name, kind, options):
    assert_recorded(name, "dualpipe", f"{recorded_class}{kind}", lambda size: options)


@pytest.mark.parametrize("row", published("published_dualpipe.json"), ids=str)
def test_time_and_memory_of_both_dualpipes_are_those_published(row):
    shape = (row["schedule"], row["ranks"], row["microbatches"])

    found = timeline(*shape)

    assert found.makespan_s == row["makespan"]
    assert found.peak_activations == [row["peak_activations"]] * row["ranks"]
    assert bubble(*shape) == row["bubble"]
