"""Every second before a step has a cause, and the rank that all wait for is found."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.measured import Prologue
from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.causes import Cause
from penstock.simulation.prologue import begin_of, idle_before, last_to_ask, with_first_waits

D, N, G, L = Cause.DATA, Cause.STRAGGLER, Cause.SYNCHRONISATION, Cause.LAUNCH


def timeline_of(ranks, waits=()):
    timeline = simulate(lower(build("1f1b", ranks=ranks, microbatches=2)), Costs.uniform())
    return replace(timeline, data_waits=tuple(waits))


def causes_of(*prologues, waits=()):
    """Per rank, the seconds of each cause that has any."""
    table = idle_before(timeline_of(len(prologues), waits), prologues).by_rank
    return [{Cause(cause): row[cause] for cause in np.flatnonzero(row)} for row in table]


QUICK = Prologue(-10.0, -9.0, -8.0)


@pytest.mark.parametrize(
    ("quick", "late", "expected"),
    [
        (QUICK, Prologue(-10.0, -3.0, -2.0), [{D: 1.0 + 5.0, L: 1.0 + 1.0, G: 2.0}, {D: 7.0, L: 1.0, G: 2.0}]),
        (QUICK, Prologue(-10.0, -9.0, -3.0), [{D: 1.0, L: 1.0, N: 5.0, G: 3.0}] * 2),
        (Prologue(-10.0, -9.0, -9.0), Prologue(-4.0, -3.0, -3.0), [{D: 1.0 + 1.0, N: 5.0, G: 3.0}, {D: 1.0, G: 3.0}]),
    ],
    ids=["its batch comes last", "it dawdles between batch and step", "it comes late out of what was before"],
)
def test_all_wait_for_the_last_rank_by_what_it_is_late_for(quick, late, expected):
    assert last_to_ask([quick, late]) == 1
    assert causes_of(quick, late) == expected


def test_the_first_microbatch_of_a_stream_counts_as_the_batch_and_all_wait_for_it():
    first, second = Prologue(-10.0, -10.0, -9.0), Prologue(-10.0, -10.0, -8.0)
    waits = [DataWait(0, 0, -9.0, -3.0), DataWait(0, 1, 1.0, 2.0), DataWait(1, 0, -8.0, -7.5)]

    with_pulls = with_first_waits(timeline_of(2, waits), [first, second])

    assert with_pulls == [Prologue(-10.0, -4.0, -3.0), Prologue(-10.0, -9.5, -7.5)]
    # Rank 1 asks at -7.5 and waits for rank 0: until -4 for its data, until -3 for its host.
    found = causes_of(first, second, waits=waits)
    assert found == [{D: 6.0, L: 1.0, G: 3.0}, {D: 0.5 + 3.5, L: 1.0 + 1.0, N: 1.0, G: 3.0}]


def test_the_step_begins_when_the_first_rank_is_free():
    assert begin_of(timeline_of(2), [Prologue(-4.0, -3.0, -3.0), Prologue(-9.0, -3.0, -3.0)]) == -9.0


@pytest.mark.parametrize("waits", [[], [DataWait(0, 0, -9.0, -3.0)]])
def test_without_prologues_nothing_is_made_of_the_first_microbatch(waits):
    timeline = timeline_of(2, waits)

    assert with_first_waits(timeline, []) == []
    assert begin_of(timeline, []) == 0.0
    assert idle_before(timeline, []).by_rank.sum(axis=1).tolist() == [0.0, 0.0]


@given(st.lists(st.lists(st.floats(-50.0, -0.001), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_causes_before_a_step_add_up_to_the_time_from_free_to_its_first_computation(rows):
    prologues = [Prologue(*sorted(row)) for row in rows]

    idle_s = idle_before(timeline_of(len(prologues)), prologues).by_rank.sum(axis=1)

    assert idle_s == pytest.approx([-prologue.free_s for prologue in prologues], abs=1e-6)
