"""Collectives: gathers and reductions in one queue beside the computations, barriers of tied groups."""

from dataclasses import replace

import pytest

from penstock.ir.collectives import IS_BARRIER
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.causes import Cause, idle_times
from tests.simulation.drawing import ends, sharded, starts


def test_a_unit_takes_the_time_of_all_its_stages():
    program = replace(sharded("0UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD"), units=((0, 1),))

    timeline = simulate(program, Costs.uniform(unshard_s=(2.0, 0.5), reduce_s=(1.0, 2.0)))

    assert (starts(timeline)["0F0"], starts(timeline)["1F0"]) == (2.5, 3.5)
    assert ends(timeline)["0REDUCE_GRAD"] == 2.5 + 6 + 3


@pytest.mark.feature("X23")
def test_a_member_comes_to_a_tied_reduction_when_its_own_reductions_are_over():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_TIED0", "2F0 2B0 2REDUCE_TIED0")

    timeline = simulate(program, Costs.uniform(reduce_s=(7.0,), tied_reduce_s=(0.5,)))

    assert (ends(timeline)["1REDUCE_GRAD"], ends(timeline)["0B0"]) == (7 + 7, 9)
    assert (starts(timeline)["0REDUCE_TIED0"], starts(timeline)["2REDUCE_TIED0"]) == (14, 5)
    assert ends(timeline)["0REDUCE_TIED0"] == ends(timeline)["2REDUCE_TIED0"] == 14.5


@pytest.mark.feature("B15")
def test_all_ranks_leave_a_barrier_when_the_last_has_come():
    program = lower(build("1f1b", ranks=4, microbatches=8), barriers=True)

    costs = Costs(forward_s=(1.0, 2.0, 1.0, 3.0), backward_s=(2.0,), latency_s=0.25)

    timeline = simulate(program, costs)

    rows = program.rows_of(IS_BARRIER)
    arrivals_s, ends_s = (times_s[rows].reshape(4, -1) for times_s in (timeline.start_s, timeline.end_s))
    assert (ends_s == arrivals_s.max(axis=0)).all()
    assert idle_times(timeline, costs).total(Cause.SYNCHRONISATION) > 0
