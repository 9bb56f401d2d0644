"""A cause costs as much as the step is longer with it than without it, and the culprit is the one that has it."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.measured import Prologue
from penstock.ir.operations import IS_RECEIVE
from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.causes import Cause, idle_times
from penstock.simulation.costs.costs import Channel
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.losses import evened, losses_of, makespan_without_waits_s
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import row_of, sharded
from tests.simulation.events import uneven_costs
from tests.simulation.slow_data import slow_rows, with_slow_data
from tests.support.strategies import feasible_schedules

EVEN = Costs(forward_s=(1.0,) * 3, backward_s=(2.0,) * 3)


def measured(costs, **changes):
    program = lower(build("1f1b", ranks=3, microbatches=6))
    return replace(simulate(program, costs), source="measured", **changes)


def losses(costs, prologues=(), timeline=None):
    found = losses_of(measured(costs) if timeline is None else timeline, costs, prologues)
    return {loss.cause: loss for loss in found}


def test_an_even_step_without_transfers_loses_to_the_order_of_its_schedule_alone():
    """1F1B idles for (p - 1)(F + B) on every rank."""
    found = losses(EVEN)

    assert (found[Cause.DEPENDENCY].duration_s, found[Cause.DEPENDENCY].culprit) == (6.0, "1f1b")
    assert {cause: loss.duration_s for cause, loss in found.items() if loss.duration_s} == {Cause.DEPENDENCY: 6.0}
    assert set(found) == set(Cause)


def test_imbalance_costs_what_even_stages_would_save():
    uneven = replace(EVEN, forward_s=(1.0, 1.0, 4.0))

    loss = losses(uneven)[Cause.IMBALANCE]

    assert loss.duration_s == measured(uneven).makespan_s - measured(evened(uneven, 3)).makespan_s > 0
    assert loss.culprit == "stage 2 on rank 2, 1.50 times the mean"


@pytest.mark.parametrize(
    ("messages", "slowest"),
    [
        ({"latency_s": 0.1, "channels": (Channel(2, 1, 0.5),)}, "rank 2 to rank 1"),
        ({"message_bytes": (8, 2, 0), "bandwidth_bytes_per_s": 16.0}, "rank 0 to rank 1"),
    ],
)
def test_transfer_costs_what_instant_messages_would_save_and_names_the_slowest_channel(messages, slowest):
    slow = replace(EVEN, **messages)

    loss = losses(slow)[Cause.TRANSFER]

    assert loss.duration_s == pytest.approx(measured(slow).makespan_s - measured(EVEN).makespan_s)
    assert loss.culprit == f"{slowest}, 500 ms a message"


def test_launches_cost_what_a_host_without_delay_would_save():
    launched = replace(EVEN, launch_s=0.01)

    found = losses(launched)

    both_s = found[Cause.LAUNCH].duration_s + found[Cause.TRANSFER].duration_s
    assert both_s == pytest.approx(measured(launched).makespan_s - measured(EVEN).makespan_s)
    assert found[Cause.LAUNCH].duration_s > 2 * found[Cause.TRANSFER].duration_s
    assert found[Cause.IMBALANCE].duration_s == 0


def test_messages_cost_their_share_where_the_fitted_latency_is_hidden_in_the_launches():
    """Messages take 0.2 s, and the fit has found that a launch does: launches were blamed for all of it."""
    timeline = measured(replace(EVEN, latency_s=0.2))
    fitted = replace(EVEN, launch_s=0.2)

    found = {loss.cause: loss for loss in losses_of(timeline, fitted)}
    idle = idle_times(timeline, fitted)

    assert idle.total(Cause.TRANSFER) > idle.total(Cause.LAUNCH)
    assert found[Cause.TRANSFER].duration_s > found[Cause.LAUNCH].duration_s
    assert found[Cause.TRANSFER].culprit.endswith("200 ms a message")


@pytest.mark.parametrize(
    ("is_slow", "how"), [(True, "slower than it usually is"), (False, "which begins later than it could")]
)
def test_what_is_longer_than_predicted_is_put_down_to_the_rank_that_was_slower_or_began_later(is_slow, how):
    """Rank 1 computes its last backward for 5 s longer, or begins it 5 s later, and all that follows begins later."""
    timeline = measured(EVEN)
    last = int(timeline.compute_rows(1)[-1])
    from_s = timeline.end_s[last] if is_slow else timeline.start_s[last]
    later_s = 5.0 * (timeline.start_s >= from_s)
    arrives = IS_RECEIVE[timeline.program.op] & (timeline.start_s < from_s)
    ends_later_s = 5.0 * (timeline.end_s >= from_s) if is_slow else np.where(arrives, 0.0, later_s)
    timeline = replace(timeline, start_s=timeline.start_s + later_s, end_s=timeline.end_s + ends_later_s)

    loss = losses(EVEN, timeline=timeline)[Cause.STRAGGLER]

    assert (loss.duration_s, loss.culprit) == (5.0, f"rank 1, {how}")


@pytest.mark.parametrize("awaits_receives", [False, True])
def test_reductions_that_hold_a_rank_up_cost_what_the_step_is_shorter_without_them(awaits_receives):
    """Rank 0 reduces its second stage for 4 s before its last two backwards of the first one."""
    program = lower(build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2))
    costs = Costs.uniform(reduce_s=(0.0, 0.0, 4.0, 0.0), awaits_receives=awaits_receives)
    timeline, beside = with_blocking_reductions(program, costs), simulate(program, costs)

    fitted = costs_from_timeline(timeline)
    found = {loss.cause: loss.duration_s for loss in losses_of(timeline, fitted)}

    assert fitted.reduce_s == costs.reduce_s
    assert found[Cause.SYNCHRONISATION] == timeline.makespan_s - beside.makespan_s > 0
    assert found[Cause.STRAGGLER] == 0
    beside = losses_of(replace(beside, source="measured"), fitted)
    assert [loss.cause for loss in beside if loss.duration_s] == [Cause.DEPENDENCY]


def test_reductions_that_a_gather_waits_for_cost_what_the_step_is_shorter_without_them():
    program = sharded("0UNSHARD 0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD")
    costs = Costs.uniform(unshard_s=(1.0,), reduce_s=(4.0,))
    timeline = replace(simulate(program, costs), source="measured")

    found = {loss.cause: loss.duration_s for loss in losses_of(timeline, costs)}

    assert found[Cause.SYNCHRONISATION] == 4


def test_a_late_rank_costs_what_it_is_later_than_the_others():
    prologues = [Prologue(-9, -8, -7), Prologue(-5, -4, -1), Prologue(-9, -8, -6)]

    found = losses(EVEN, prologues)

    # Free 4 s later than rank 0 and 2 s more from batch to step; then rank 2, itself 1 s late, would be the last.
    assert (found[Cause.STRAGGLER].duration_s, found[Cause.STRAGGLER].culprit) == (6.0, "rank 1, late for the step")
    assert found[Cause.SYNCHRONISATION].duration_s == 1.0


def test_slow_data_costs_what_a_batch_at_once_would_save():
    prologues = [Prologue(-9, -8, -7), Prologue(-9, -2, -1), Prologue(-9, -7, -5)]

    loss = losses(EVEN, prologues)[Cause.DATA]

    # Without its 7 s rank 1 would ask at -8; but then rank 2, without its own 2 s, at -7.
    assert (loss.duration_s, loss.culprit) == (6.0, "rank 1")


def slow_step(slow, *waits):
    """A measured step, with the seconds that data take before the instructions named."""
    program = lower(build("1f1b", ranks=3, microbatches=6))
    timeline = with_slow_data(program, EVEN, {row_of(program, text): data_s for text, data_s in slow.items()})
    return replace(timeline, source="measured", data_waits=(*timeline.data_waits, *waits))


def test_data_that_come_late_within_the_step_cost_what_it_would_be_shorter_and_nothing_else_is_blamed():
    timeline = slow_step({"2F0": 0.5, "0F3": 4.0, "0F5": 0.0})

    found = losses(EVEN, timeline=timeline)

    longer_s = timeline.makespan_s - measured(EVEN).makespan_s
    assert longer_s > 1
    assert {cause: loss.duration_s for cause, loss in found.items() if loss.duration_s} == {
        Cause.DEPENDENCY: 6.0,
        Cause.DATA: longer_s,
    }
    assert found[Cause.DATA].culprit == "rank 0, for microbatches within the step"


def test_of_data_before_and_within_the_step_the_larger_part_names_the_culprit():
    prologues = [Prologue(-9, -9, -9)] * 3
    inside_s = slow_step({"2F3": 4.0}).makespan_s - measured(EVEN).makespan_s

    for first_s, culprit in ((1.0, "rank 2, for microbatches within the step"), (8.0, "rank 1")):
        timeline = slow_step({"2F3": 4.0}, DataWait(1, 0, -9.0, first_s - 9.0))
        timeline = replace(timeline, data_waits=tuple(sorted(timeline.data_waits, key=lambda wait: wait.rank)))

        found = losses(EVEN, prologues, timeline)

        assert (found[Cause.DATA].duration_s, found[Cause.DATA].culprit) == (first_s + inside_s, culprit)
        assert found[Cause.STRAGGLER].duration_s == 0
        assert found[Cause.SYNCHRONISATION].duration_s == 9.0 - first_s


def test_even_costs_have_the_same_sum_and_leave_out_what_is_unknown():
    costs = evened(Costs(forward_s=(1.0, 3.0), backward_s=(2.0,), latency_s=0.5), 2)

    assert (costs.forward_s, costs.backward_s, costs.backward_input_s) == ((2.0,), (2.0,), ())
    assert costs.latency_s == 0.5


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


@given(feasible_schedules(), st.booleans(), st.integers(0, 2**32))
def test_a_step_with_barriers_is_laid_out_again_without_waits_for_data_of_any_rank(schedule, loads, seed):
    program = lower(replace(schedule, joined=np.zeros_like(schedule.joined)), loads=loads, barriers=True)
    # A recorder notes what a LOAD takes as a wait for data, which the second simulator does for slow rows alone.
    costs = replace(free_wires(program, seed), load_s=(0.0,))
    timeline = with_slow_data(program, costs, slow_rows(program, seed))
    blocking = with_blocking_reductions(program, costs, slow_rows(program, seed))

    everyone = range(program.num_ranks)
    assert makespan_without_waits_s(timeline, everyone) == with_slow_data(program, costs, {}).makespan_s
    assert makespan_without_waits_s(timeline, ()) == timeline.makespan_s
    assert makespan_without_waits_s(blocking, everyone) == with_blocking_reductions(program, costs).makespan_s
    assert makespan_without_waits_s(blocking, ()) == blocking.makespan_s


def test_data_that_are_late_for_one_rank_are_no_loss_by_the_barriers_at_which_the_others_wait():
    program = lower(build("1f1b", ranks=3, microbatches=6), barriers=True)
    timeline = replace(with_slow_data(program, EVEN, {row_of(program, "0F2"): 20.0}), source="measured")

    found = losses(EVEN, timeline=timeline)

    saved_s = timeline.makespan_s - simulate(program, EVEN).makespan_s
    assert (found[Cause.DATA].duration_s, found[Cause.DATA].culprit) == (
        saved_s,
        "rank 0, for microbatches within the step",
    )
    assert found[Cause.SYNCHRONISATION].duration_s < saved_s


def test_a_host_that_waits_for_data_while_its_device_reduces_waits_once():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0")
    timeline = with_blocking_reductions(program, Costs.uniform(reduce_s=(3.0,)), {row_of(program, "0B0"): 1.0})
    (wait,) = timeline.data_waits  # from 7, when the reduction is over, to 8
    timeline = replace(timeline, data_waits=(replace(wait, begin_s=5.0),))

    assert timeline.makespan_s == 10
    assert makespan_without_waits_s(timeline, [0]) == 9
    assert makespan_without_waits_s(timeline, [0], is_reducing=False) == 6
