"""Merged columns: the seconds of all blocks, no more and no less."""

import numpy as np
import pytest

from penstock.ir.action import Kind
from penstock.show.density import column_edges, density_of, lanes_of_ranks, rasterise
from tests.show.timelines import UNIT, paired_timeline, timeline_of


def shares(timeline, edges, lanes=None):
    lanes = lanes or [range(rank, rank + 1) for rank in range(timeline.num_ranks)]
    return density_of(timeline, np.array(edges, float), lanes)


def test_columns_hold_the_share_of_their_time():
    found = shares(timeline_of(2, 2, costs=UNIT), [0, 3, 6, 9])

    forward, backward = found[0, :, Kind.FORWARD], found[0, :, Kind.BACKWARD]
    assert forward.tolist() == pytest.approx([2 / 3, 0, 0])
    assert backward.tolist() == pytest.approx([0, 2 / 3, 2 / 3])
    assert found[1].sum(axis=1).tolist() == pytest.approx([2 / 3, 1, 1 / 3])


@pytest.mark.parametrize(("name", "shape"), [("zbv", (4, 9)), ("dualpipe", (4, 8)), ("interleaved-1f1b", (3, 6))])
def test_no_second_is_lost(name, shape):
    timeline = timeline_of(*shape, name)
    edges = np.linspace(0, timeline.makespan_s, 14)

    found = shares(timeline, edges)

    busy_s = (found * np.diff(edges)[:, None]).sum(axis=(1, 2))
    assert busy_s == pytest.approx(timeline.work_s)


def test_halves_of_a_pair_count_half():
    found = shares(paired_timeline(), [0, 1, 4, 6])

    assert found[0, 1, Kind.FORWARD] == found[0, 1, Kind.BACKWARD] == pytest.approx(0.5)


def test_shades_are_columns_of_their_own():
    timeline = timeline_of(2, 4, "zbv", UNIT)

    found = shares(timeline, [0, timeline.makespan_s])

    assert found.shape == (2, 1, 2 * len(Kind))
    assert found[0, 0, 0] == found[0, 0, 1] == pytest.approx(4 / timeline.makespan_s)


def test_a_lane_of_several_ranks_is_their_mean():
    timeline = timeline_of(4, 6, costs=UNIT)
    edges = [0, 5, 10, 40]

    single, double = shares(timeline, edges), shares(timeline, edges, [range(0, 2), range(2, 4)])

    assert double[0] == pytest.approx((single[0] + single[1]) / 2)


def test_ranks_share_lanes_only_where_there_are_too_many():
    assert lanes_of_ranks(3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert lanes_of_ranks(5, max_lanes=2) == [range(0, 3), range(3, 5)]
    assert len(lanes_of_ranks(1024)) == 64


def test_columns_are_whole_periods_and_equal_without_one():
    assert column_edges(30.0, 3.0, 100).tolist() == [3.0 * column for column in range(11)]
    assert column_edges(30.0, 3.0, 5).tolist() == [0, 6, 12, 18, 24, 30]
    assert column_edges(31.0, 3.0, 5).tolist() == [0, 9, 18, 27, 36]
    assert column_edges(10.0, 0.0, 4).tolist() == [0, 2.5, 5, 7.5, 10]
    assert column_edges(0.0, 0.0, 4).tolist() == [0, 1]


def test_pixels_are_stacked_from_the_bottom():
    share = np.array([[[0.25, 0.5], [0.0, 1.0], [0.0, 0.0]]])  # one lane, three columns, two categories

    assert rasterise(share, 4)[0].T.tolist() == [[-1, 1, 1, 0], [1, 1, 1, 1], [-1, -1, -1, -1]]
