"""Collectives and optimizer steps: where they lie, and what ends when."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.show.bars import COLLECTIVE, COPY, OPTIMIZER_STEP, bars_of_rank, last_end_s, merged, sorts_used, window_s
from penstock.show.figures import legend_of
from penstock.show.palette import COPY_COLOUR
from penstock.simulation import Costs, simulate
from tests.show.timelines import UNIT, timeline_of, timeline_with_bars


def test_what_takes_no_time_is_no_bar():
    timeline = simulate(lower(build("1f1b", ranks=2, microbatches=2), optimizer_step=True), UNIT)

    assert sorts_used([timeline]) == []
    assert len(bars_of_rank(timeline, 0).row) == 0


def test_copies_are_bars_of_their_own_from_their_launch_to_their_end():
    program = lower(build("gpipe", ranks=1, microbatches=3), offload=[0])

    timeline = simulate(program, Costs.uniform(offload_s=0.5, reload_s=0.25))
    bars = bars_of_rank(timeline, 0)

    assert [str(program.instruction(row)) for row in bars.row] == [
        "0OFFLOAD0", "0OFFLOAD1", "0RELOAD0", "0OFFLOAD2", "0RELOAD1", "0RELOAD2",
    ]  # fmt: skip
    assert set(bars.sort.tolist()) == {COPY}
    assert bars.start_s.tolist() == [1, 2, 2, 3, 3, 5]
    assert bars.end_s.tolist() == [1.5, 2.5, 2.75, 3.5, 3.75, 5.25]
    assert legend_of([timeline], ink="ink", bubble="grey")["copy"] == (COPY_COLOUR,)


def test_the_sorts_of_any_timeline_count():
    timelines = [timeline_of(2, 2), timeline_with_bars()]

    assert sorts_used(timelines) == [COLLECTIVE, OPTIMIZER_STEP]
    assert sorts_used(timelines, longer_than_s=2.0) == [COLLECTIVE]  # of 2.5 s, waiting included
    assert sorts_used(timelines, longer_than_s=2.5) == []


def test_idle_time_lies_between_the_first_and_the_last_computation_and_bars_may_end_later():
    timeline = timeline_with_bars()
    later = replace(timeline, start_s=timeline.start_s + 3, end_s=timeline.end_s + 3)

    assert window_s(timeline) == (0.0, 9.0)
    assert last_end_s(timeline) == 11.5
    assert window_s(later) == (3.0, 12.0)


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [
        ([], [], []),
        ([0.0, 1.5, 4.0], [1.0, 2.0, 5.0], [(0.0, 2.0), (4.0, 5.0)]),
        ([4.0, 0.0, 1.0], [5.0, 9.0, 2.0], [(0.0, 9.0)]),
    ],
)
def test_bars_nearer_than_can_be_seen_are_one(start_s, end_s, expected):
    assert list(zip(*merged(np.array(start_s), np.array(end_s), 0.5), strict=True)) == expected
