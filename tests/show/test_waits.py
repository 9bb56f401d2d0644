"""What computations waited for."""

import numpy as np

from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.show.waits import waits_of
from penstock.simulation import Costs
from tests.show.timelines import UNIT, paired_timeline, timeline_of


def waits(timeline):
    """By the text of each computation: the text of what it waited for and when that was there; None for nothing."""
    found = waits_of(timeline)
    program = timeline.program
    rows = [row for rank in range(timeline.num_ranks) for row in timeline.compute_rows(rank).tolist()]
    return {
        str(program.instruction(row)): None
        if found.producer[row] == NONE
        else (str(program.instruction(int(found.producer[row]))), float(found.arrival_s[row]))
        for row in rows
    }


def test_computations_wait_for_messages_of_other_ranks():
    assert waits(timeline_of(2, 2, costs=Costs.uniform(transfer=0.25))) == {
        "0F0": None,
        "0F1": None,
        "0B0": ("1B0", 4.5),
        "0B1": ("1B1", 7.5),
        "1F0": ("0F0", 1.25),
        "1B0": None,
        "1F1": ("0F1", 2.25),
        "1B1": None,
    }


def test_what_stays_on_its_rank_is_not_waited_for():
    found = waits(timeline_of(2, 2, "zbv", UNIT))

    assert found["1F0"] == ("0F0", 1.0)
    assert found["2F0"] is None  # the V turns on rank 1
    assert all(wait is None for text, wait in found.items() if "W" in text)


def test_a_pair_waits_for_the_later_of_its_messages():
    timeline = timeline_of(4, 8, "dualpipe", UNIT)
    found, source = waits_of(timeline), predecessors(timeline.program)[:, 0]
    first = np.flatnonzero(timeline.program.joined)

    is_message = np.isin(timeline.program.op[source], (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD))
    own_s = np.where(is_message & (source != NONE), timeline.end_s[source], 0.0)
    arrivals_s = np.array([own_s[first], own_s[first + 1]])
    assert len({*np.argmax(arrivals_s, axis=0).tolist()}) == 2, "the later one is now the first, now the second"
    for half in (first, first + 1):
        assert found.arrival_s[half].tolist() == arrivals_s.max(axis=0).tolist()
    assert found.producer[first].tolist() == found.producer[first + 1].tolist()


def test_a_program_without_messages_waits_for_none():
    assert set(waits(paired_timeline()).values()) == {None}
