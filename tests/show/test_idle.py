"""Every gap of a lane with its causes: those that the doctor adds up, at their places."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.show.idle import NAME_OF_CAUSE, idle_gaps
from penstock.simulation import Costs
from penstock.simulation.causes import Cause, idle_times
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.message_latency import Transfers, with_true_arrivals
from tests.show.timelines import UNIT, paired_timeline, timeline_of, timeline_with_bars


def entries(gaps):
    return list(zip(gaps.gap.tolist(), map(Cause, gaps.cause.tolist()), gaps.duration_s.tolist(), strict=True))


def summed(found):
    """[ranks, causes] seconds."""
    return np.array([np.bincount(one.cause, weights=one.duration_s, minlength=len(Cause)) for one in found])


def test_a_gap_is_named_by_the_number_of_blocks_before_it():
    first, second = idle_gaps(timeline_with_bars(), UNIT)

    assert entries(first) == [(2, Cause.DEPENDENCY, 2.0), (3, Cause.DEPENDENCY, 1.0)]
    assert entries(second) == [(0, Cause.DEPENDENCY, 1.0), (4, Cause.SYNCHRONISATION, 2.0)]


def test_a_gap_may_have_several_causes():
    costs = Costs.uniform(transfer=0.25)

    first, _ = idle_gaps(timeline_of(2, 2, costs=costs), costs)

    assert entries(first)[:2] == [(2, Cause.DEPENDENCY, 2.25), (2, Cause.TRANSFER, 0.25)]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_the_gaps_of_a_rank_add_up_to_what_the_doctor_tells(name, source):
    costs = Costs.uniform(forward=0.013, backward_input=0.011, backward_weight=0.007, transfer=0.002)
    timeline = replace(timeline_of(4, 8, name, costs=costs), source=source)
    true = with_true_arrivals(timeline) if source == "measured" else timeline

    expected = idle_times(true, costs_from_timeline(true)).by_rank

    assert summed(idle_gaps(timeline)) == pytest.approx(expected)
    assert expected.sum() > 0


def noticed_late(timeline):
    """A host that needs a tenth of each computation before it, and looks for messages after that."""
    transfers, rows = Transfers.of(timeline.program), timeline.program.is_compute
    start_s, end_s = timeline.start_s.copy(), timeline.end_s.copy()
    start_s[rows] += 0.1 * (end_s - start_s)[rows]
    end_s[transfers.receives] = start_s[transfers.consumers]
    return replace(timeline, source="measured", start_s=start_s, end_s=end_s)


def test_a_message_that_was_there_before_it_was_looked_for_is_not_waited_for():
    timeline = noticed_late(timeline_of(2, 8, costs=Costs.uniform(transfer=0.25)))
    true = with_true_arrivals(timeline)

    expected = idle_times(true, costs_from_timeline(true)).by_rank

    assert summed(idle_gaps(timeline)) == pytest.approx(expected)
    assert expected != pytest.approx(idle_times(timeline, costs_from_timeline(timeline)).by_rank)


def test_a_rank_that_is_never_idle_has_no_entry():
    (found,) = idle_gaps(paired_timeline())

    assert entries(found) == []


def test_every_cause_has_a_name():
    assert set(NAME_OF_CAUSE) == set(Cause)
