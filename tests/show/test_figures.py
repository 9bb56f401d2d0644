"""The texts above a picture."""

from dataclasses import replace

import pytest

from penstock.show.figures import describe_shape, figures_of, idle_share
from penstock.simulation import Costs
from tests.show.timelines import UNIT, timeline_of


@pytest.mark.parametrize(
    ("timeline", "name", "figure"),
    [
        (timeline_of(1, 2, costs=Costs.uniform(activation_bytes=(2**20,))), "peak", "1 microbatch (1.00 MiB)"),
        (replace(timeline_of(2, 2), clock_uncertainty_s=3e-5), "clocks", "within 30.0 µs"),
        (timeline_of(1, 7, costs=Costs.uniform(forward=0.1)), "bubble fraction", "0.0 %"),
        (timeline_of(4, 8, "zbv"), "peak", "4 microbatches"),
    ],
    ids=["known bytes", "several hosts", "no bubble", "stages that hold half a microbatch each"],
)
def test_a_figure_says_what_is_special(timeline, name, figure):
    assert figures_of(timeline)[name] == figure


def test_a_title_says_what_is_special():
    assert describe_shape(timeline_of(2, 1).program) == "1f1b, 2 ranks, 1 microbatch"
    assert describe_shape(timeline_of(2, 4, "zbv").program) == "zbv, 2 ranks, 4 stages, 4 microbatches"
    sliced = timeline_of(2, 4, "seq1f1b", slices=3).program
    assert describe_shape(sliced) == "seq1f1b, 2 ranks, 4 microbatches, 3 slices"


def test_ranks_are_idle_in_the_mean():
    timeline = timeline_of(2, 2, costs=UNIT)

    assert idle_share(timeline, range(0, 1)) == 1 - 6 / 9
    assert idle_share(timeline, range(0, 2)) == 1 - 6 / 9
