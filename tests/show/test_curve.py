"""What is alive over time."""

import numpy as np

from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.show.curve import memory_curves
from penstock.simulate import Costs, simulate
from tests.show.timelines import timeline_of


def steps(curve):
    return list(zip(np.round(curve.time_s, 6).tolist(), curve.alive.tolist(), strict=True))


def test_an_activation_is_alive_from_the_start_of_its_forward_to_the_end_of_its_backward():
    (first, second) = memory_curves(timeline_of(2, 2, costs=Costs.uniform()))

    assert steps(first) == [(0, 1), (1, 1), (1, 2), (2, 2), (4, 2), (6, 1), (7, 1), (9, 0)]
    assert steps(second) == [(1, 1), (2, 1), (2, 1), (4, 0), (4, 1), (5, 1), (5, 1), (7, 0)]


def test_bytes_are_drawn_where_they_are_known_unless_counts_are_wanted():
    timeline = timeline_of(2, 2, costs=Costs.uniform(activation_bytes=(100,), weight_context_bytes=(10,)))

    assert memory_curves(timeline)[0].is_bytes
    assert memory_curves(timeline)[0].alive.max() == 200
    assert memory_curves(timeline, in_bytes=False)[0].alive.max() == 2


def test_the_peak_of_a_curve_is_the_peak_of_the_timeline():
    timeline = timeline_of(4, 9)

    assert [int(curve.alive.max()) for curve in memory_curves(timeline)] == timeline.peak_activations


def test_an_overlapped_pair_is_one_step():
    pair = OverlappedPair(Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0))
    order = [Action(Kind.FORWARD, 0, 0), pair, Action(Kind.BACKWARD, 0, 1)]
    schedule = Schedule.from_actions("pair", Placement.line(1), [order], num_microbatches=2)
    timeline = simulate(Program.from_schedule(schedule), Costs.uniform())

    (curve,) = memory_curves(timeline)

    assert steps(curve) == [(0, 1), (1, 1), (1, 2), (4, 1), (4, 1), (6, 0)]
