"""The texts around a drawing."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.show.caption import add_lane_figures, add_legend, name_ranks, notes_on
from penstock.show.lanes import Detail, Lane, TimeScale
from penstock.show.palette import THEMES
from penstock.show.sheet import Sheet
from tests.show.timelines import UNIT, timeline_of, timeline_with_bars

SHEET = Sheet.of(8.0, 4.0, THEMES["light"], "svg")


def lanes_of(timeline, *sizes):
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [Lane(timeline, range(ends[index] - size, ends[index]), -index, 1.0) for index, size in enumerate(sizes)]


def notes(name, shape, detail, *sizes):
    timeline = timeline_of(*shape, name, UNIT)
    return notes_on(lanes_of(timeline, *sizes), detail, TimeScale.of(timeline.makespan_s), 8.0)


def test_shades_pairs_columns_and_shared_lanes_are_explained():
    shades, pairs = notes("dualpipe", (4, 8), Detail.NUMBERED, 1, 1, 1, 1)
    columns, lanes = notes("1f1b", (4, 8), Detail.MERGED, 2, 2)

    assert notes("1f1b", (2, 4), Detail.NUMBERED, 1, 1) == []
    assert shades.startswith("dark: stages 0-3")
    assert pairs == "upper and lower half of a block: two actions that overlap"
    assert "a column is 3.00 s of a rank's time" in columns
    assert lanes == "a lane is the mean of 2 ranks"


def legend_of(*timelines):
    sheet = Sheet.of(8.0, 4.0, THEMES["light"], "svg")
    add_legend(sheet, timelines)
    (legend,) = sheet.figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_legend_leaves_out_bars_that_are_a_hair():
    """A reduction by a hook that does nothing takes some microseconds."""
    timeline = timeline_with_bars()
    is_bar = ~timeline.program.is_compute
    end_s = np.where(is_bar, np.minimum(timeline.end_s, timeline.start_s + 1e-3), timeline.end_s)

    assert legend_of(replace(timeline, end_s=end_s))[-1] == "bubble"


TWICE = [Lane(timeline_of(1, 2), range(1), bottom, 0.4) for bottom in (0.5, 0.1)]


@pytest.mark.parametrize(
    ("lanes", "names", "places"),
    [
        (lanes_of(timeline_of(5, 5), 1, 1, 3), ["rank 0", "rank 1", "ranks 2-4"], [0.5, -0.5, -1.5]),
        (TWICE, ["rank 0"], [0.5]),
    ],
    ids=["one lane each", "two lanes of a rank share its name"],
)
def test_ranks_are_named_at_the_middle_of_their_lanes(lanes, names, places):
    axes = SHEET.add_axes(0.5, 2.0)

    name_ranks(axes, lanes, SHEET)

    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert axes.get_yticks().tolist() == places


def test_lanes_tell_how_idle_they_are_and_their_peak_or_their_timeline():
    timeline = timeline_of(2, 2, costs=UNIT)
    scale = TimeScale.of(timeline.makespan_s)
    axes = SHEET.add_axes(0.5, 2.0)

    add_lane_figures(axes, lanes_of(timeline, 1, 1), scale, SHEET, names_source=False)
    add_lane_figures(axes, lanes_of(timeline, 1), scale, SHEET, names_source=True)

    assert [text.get_text() for text in axes.texts] == [
        "33.3 % idle, peak 2",
        "33.3 % idle, peak 1",
        "predicted  33.3 % idle",
    ]
