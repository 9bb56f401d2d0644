"""Without its waits for data a step is the one that is simulated without them."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lowering import lower
from penstock.simulation import Costs, simulate
from penstock.simulation.without_waits import makespan_without_waits_s
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import drawn, row_of, sharded
from tests.simulation.events import uneven_costs
from tests.simulation.slow_data import slow_rows, with_slow_data
from tests.strategies import feasible_schedules


def free_wires(program, seed):
    """Costs in which messages arrive at once and no host is slow, so that each start is an end."""
    costs = uneven_costs(program, seed)
    return replace(costs, launch_s=0.0, latency_s=0.0, is_exclusive=False, channels=(), bandwidth_bytes_per_s=inf)


@pytest.mark.slow
@given(feasible_schedules(), st.integers(0, 2**32))
def test_what_is_left_is_the_step_that_would_have_been(schedule, seed):
    """Without pairs: how long a message to one took cannot be seen."""
    program = lower(replace(schedule, joined=np.zeros_like(schedule.joined)))
    costs = free_wires(program, seed)
    timeline = with_slow_data(program, costs, slow_rows(program, seed))

    everyone = range(program.num_ranks)
    blocking = with_blocking_reductions(program, costs, slow_rows(program, seed))
    assert makespan_without_waits_s(timeline, everyone) == simulate(program, costs).makespan_s
    assert makespan_without_waits_s(timeline, ()) == timeline.makespan_s
    assert makespan_without_waits_s(blocking, everyone) == with_blocking_reductions(program, costs).makespan_s
    assert makespan_without_waits_s(blocking, everyone, is_reducing=False) == simulate(program, costs).makespan_s
    assert makespan_without_waits_s(blocking, ()) == blocking.makespan_s


def test_a_wait_that_a_message_covers_would_gain_nothing():
    program = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2)
    costs = replace(Costs.uniform(), forward_s=(4.0, 1.0))

    covered, longer = (with_slow_data(program, costs, {row_of(program, "1F1"): data_s}) for data_s in (2.0, 3.5))

    assert makespan_without_waits_s(covered, [1]) == covered.makespan_s == 9.0
    assert (makespan_without_waits_s(longer, [1]), longer.makespan_s) == (9.0, 9.5)


def test_only_the_ranks_that_are_named_stop_waiting():
    program = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2)
    timeline = with_slow_data(program, Costs.uniform(), {row_of(program, "0F1"): 2.0, row_of(program, "1F1"): 3.0})

    assert timeline.makespan_s == 6.0  # 1F0 from 1 to 2, data until 5
    assert [makespan_without_waits_s(timeline, ranks) for ranks in ([0], [1], [0, 1])] == [6.0, 5.0, 3.0]


def test_a_pause_that_no_data_explain_stays():
    program = drawn("0F0 0F1", num_microbatches=2)
    timeline = with_slow_data(program, Costs.uniform(), {1: 2.0})
    pause_s = np.array([0.0, 0.5])
    later = replace(timeline, start_s=timeline.start_s + pause_s, end_s=timeline.end_s + pause_s)

    assert (later.makespan_s, makespan_without_waits_s(later, [0])) == (4.5, 2.5)


def test_a_reduction_that_blocks_still_holds_its_rank_up():
    program = sharded("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1REDUCE_GRAD 1RECV_F1 1F1")
    timeline = with_blocking_reductions(program, Costs.uniform(reduce_s=(2.0,)), {row_of(program, "0F1"): 3.0})

    assert timeline.makespan_s == 6
    assert makespan_without_waits_s(timeline, [0]) == 5  # the input of 1F1 is there at 2, the reduction is over at 4
    assert makespan_without_waits_s(timeline, [0], is_reducing=False) == 3


def test_a_host_that_waits_for_data_while_its_device_reduces_waits_once():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0")
    timeline = with_blocking_reductions(program, Costs.uniform(reduce_s=(3.0,)), {row_of(program, "0B0"): 1.0})
    (wait,) = timeline.data_waits  # from 7, when the reduction is over, to 8
    timeline = replace(timeline, data_waits=(replace(wait, begin_s=5.0),))

    assert timeline.makespan_s == 10
    assert makespan_without_waits_s(timeline, [0]) == 9
    assert makespan_without_waits_s(timeline, [0], is_reducing=False) == 6
