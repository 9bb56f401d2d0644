"""The memory of a rank over time."""

import numpy as np

from penstock.show.curve import MemoryCurve, largest_within, memory_curves, without_spikes
from penstock.simulation import Costs
from tests.show.timelines import UNIT, paired_timeline, timeline_of


def steps(curve):
    return list(zip(np.round(curve.time_s, 6).tolist(), curve.alive.tolist(), strict=True))


def curve_of(*steps):
    return MemoryCurve(np.array([time for time, _ in steps], float), np.array([alive for _, alive in steps]))


def test_an_activation_is_alive_from_the_start_of_its_forward_to_the_end_of_its_backward_and_spikes_go():
    (first, second) = memory_curves(timeline_of(2, 2, costs=UNIT))

    assert steps(first) == [(0, 1), (1, 1), (1, 2), (2, 2), (4, 2), (6, 1), (7, 1), (9, 0)]
    assert steps(second) == [(1, 1), (2, 1), (2, 1), (4, 0), (4, 1), (5, 1), (5, 1), (7, 0)]
    assert steps(without_spikes(second)) == [(1, 1), (2, 1), (4, 1), (5, 1), (7, 0)]


def test_bytes_are_drawn_where_they_are_known_unless_counts_are_wanted():
    timeline = timeline_of(2, 2, costs=Costs.uniform(activation_bytes=(100,), weight_context_bytes=(10,)))

    assert memory_curves(timeline)[0].alive.max() == 200
    assert memory_curves(timeline, in_bytes=False)[0].alive.max() == 2


def test_an_overlapped_pair_is_one_step():
    (curve,) = memory_curves(paired_timeline())

    assert steps(curve) == [(0, 1), (1, 1), (1, 2), (4, 1), (4, 1), (6, 0)]


def test_a_column_shows_the_most_that_is_alive_in_it():
    curve = curve_of((1, 3), (2, 1), (5, 2), (6, 0))

    assert largest_within(curve, np.array([0.0, 1, 1.5, 3, 4, 5.5, 7, 8])).tolist() == [0, 3, 3, 1, 2, 2, 0]
