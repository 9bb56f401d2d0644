"""Curves of memory: which ranks, in which unit."""

import numpy as np
import pytest

from penstock.show.curve import MemoryCurve
from penstock.show.lanes import TimeScale
from penstock.show.memory_panel import MAX_CURVES, chosen_ranks, draw_memory
from penstock.show.palette import THEMES
from penstock.show.sheet import Sheet
from penstock.simulation import Costs
from tests.show.timelines import UNIT, timeline_of


def drawn(timeline):
    sheet = Sheet.of(8.0, 3.0, THEMES["light"], "svg")
    axes = sheet.add_axes(0.5, 2.0)
    draw_memory(axes, timeline, TimeScale.of(timeline.makespan_s), sheet)
    return axes


def flat(*levels):
    return [MemoryCurve(np.zeros(1), np.array([level])) for level in levels]


def test_few_ranks_are_all_drawn_and_named():
    axes = drawn(timeline_of(3, 5))

    assert [line.get_label() for line in axes.lines] == ["rank 0", "rank 1", "rank 2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1", "rank 2"]


def test_of_many_ranks_some_are_drawn_among_them_the_ends_and_the_peak():
    levels = [1] * 40
    levels[23] = 9

    ranks = chosen_ranks(flat(*levels))

    assert len(ranks) == MAX_CURVES
    assert {0, 23, 39} <= set(ranks)
    assert chosen_ranks(flat(*[1] * MAX_CURVES)) == list(range(MAX_CURVES))


def test_a_line_steps_where_memory_does():
    (line,) = drawn(timeline_of(1, 2, costs=UNIT)).lines

    assert line.get_drawstyle() == "steps-post"
    assert line.get_xdata().tolist() == [0, 0, 1, 3, 4, 6, 6]
    assert line.get_ydata().tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_very_many_steps_are_merged_without_losing_the_peak():
    timeline = timeline_of(2, 600)

    (first, second) = drawn(timeline).lines

    assert len(first.get_xdata()) < 600
    assert (first.get_ydata().max(), second.get_ydata().max()) == (2, 1)


@pytest.mark.parametrize(
    ("costs", "unit"),
    [(UNIT, "microbatches"), (Costs.uniform(activation_bytes=(2**20,)), "MiB")],
)
def test_the_unit_is_named(costs, unit):
    assert drawn(timeline_of(2, 4, costs=costs)).get_ylabel() == f"alive\n({unit})"
