"""Sweeps have in common: gaps are filled with W, and idle time decides on one more."""

from collections import namedtuple

import numpy as np

from penstock.placement import Placement
from penstock.searching.sequences import Columns, Timing, clear
from penstock.searching.sweeps.common import Sweep, do, make_room, most_idle_s
from penstock.simulation import Costs
from tests.searching.cases import problem_of

M = 4
"""Microbatches."""
Room = namedtuple("Room", "columns sweep timing")


def room_of(limit=None, **costs):
    """Two ranks that have run the F and the I of two microbatches; F takes 1 s, I 2 s, W 3 s."""
    costs = {"forward": 1.0, "backward_input": 2.0, "backward_weight": 3.0, "transfer": 0.5} | costs
    costs = Costs.uniform(**costs, activation_bytes=10, weight_context_bytes=4)
    problem = problem_of(Placement.line(2), M, costs, limit)
    room = Room(Columns.of(problem), Sweep.of(problem), Timing.of(problem))
    clear(room.timing)
    for action in (F(0, 0), F(0, 1), F(1, 0), I(1, 0), F(1, 1), I(1, 1), I(0, 0), I(0, 1)):
        do(*room, action)
    return room


def F(stage, microbatch):  # noqa: N802
    return stage * M + microbatch


def I(stage, microbatch):  # noqa: N802, E743
    return 2 * M + stage * M + microbatch


def W(stage, microbatch):  # noqa: N802
    return 4 * M + stage * M + microbatch


def found(room):
    return room.sweep.sequence[: room.sweep.length[0]].tolist()


def test_what_was_allowed_before_may_be_idled_again():
    room = room_of()
    assert most_idle_s(room.sweep, 1) == 4.0

    allowed = Sweep.of(problem_of(Placement.line(2), M, Costs.uniform()), np.array([1.0, 6.0]))
    assert most_idle_s(allowed, 0) == 5.0
    assert most_idle_s(allowed, 1) == 0.0


def test_room_is_made_by_weights_and_not_otherwise():
    room = room_of(limit=16)
    before = len(found(room))

    assert make_room(*room, F(0, 2))  # two contexts of 4 bytes, so one has to go for 10 more
    assert found(room)[before:] == [W(0, 0)]
    do(*room, F(0, 2))
    assert not make_room(*room, F(0, 3))
    assert found(room)[-1] == W(0, 1)


def test_room_for_a_forward_has_the_workspace_of_a_backward_too():
    room = room_of(limit=22, backward_workspace_bytes=5)
    before = len(found(room))

    assert make_room(*room, F(0, 2))  # two contexts of 4 bytes and 10 more leave 4 of the 5 that a backward takes
    assert found(room)[before:] == [W(0, 0)]
