"""A recorded step on the simulated clock is what the simulator says of the same costs."""

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.operations import IS_RECEIVE, IS_SEND, Op
from penstock.simulation import simulate
from penstock.simulation.message_latency import Transfers
from tests.emulated.timed_pipelines import MESSAGE_BYTES, Plan, timed_step

pytestmark = pytest.mark.emulated

SHAPES = {
    "gpipe": (3, 4),
    "1f1b": (4, 6),
    "zb-h1": (3, 6),
    "interleaved-1f1b": (2, 4),
    "zbv": (3, 4),
    "dualpipe-v": (2, 4),
}
"""Ranks and microbatches."""
RUN_AHEAD = [None, 1, 2]
TRANSFER_S = 0.3
TOLERANCE = 0.001
"""Of the makespan. What else a computation runs beside its planted seconds takes less."""


def costs_of(num_stages, transfer_s):
    """Every stage takes another time; messages are those of a device: one after the other, once both ends are there."""
    stages = range(num_stages)
    return ps.Costs(
        forward_s=tuple(1.0 + 0.25 * (3 * stage % 4) for stage in stages),
        backward_input_s=tuple(1.0 + 0.5 * ((2 * stage + 1) % 3) for stage in stages),
        backward_weight_s=tuple(0.5 + 0.25 * (stage % 3) for stage in stages),
        reduce_s=tuple(0.5 + 0.5 * (stage % 2) for stage in stages),
        optimizer_s=(0.25,) * num_stages,
        message_bytes=(MESSAGE_BYTES,),
        bandwidth_bytes_per_s=MESSAGE_BYTES / transfer_s if transfer_s else float("inf"),
        is_exclusive=True,
        awaits_receives=True,
    )


def plan_of(family, transfer_s, run_ahead=None):
    num_ranks, num_microbatches = SHAPES[family]
    num_stages = ps.build(family, ranks=num_ranks, microbatches=num_microbatches).num_stages
    return Plan(family, num_ranks, num_microbatches, costs_of(num_stages, transfer_s), run_ahead)


def plans():
    """Every family with every `run_ahead`, all but one of them slow, and with and without time for messages."""
    for place, family in enumerate(SHAPES):
        for number, run_ahead in enumerate(RUN_AHEAD):
            plan = plan_of(family, TRANSFER_S * ((place + number) % 2), run_ahead)
            yield pytest.param(plan, id=str(plan), marks=() if number == place % 3 else pytest.mark.slow)


def predicted_of(program, costs):
    """Without a function that overlaps them, pairs run one by one."""
    return simulate(replace(program, joined=np.zeros_like(program.joined)), costs)


def run(emulated, plan):
    return emulated.run(timed_step, plan, num_ranks=plan.num_ranks, timeout_s=60)


def aligned(timeline):
    """Start and end of every row, from the first computation on."""
    first_s = timeline.start_s[timeline.program.is_compute].min()
    return timeline.start_s - first_s, timeline.end_s - first_s


@pytest.mark.feature("H11")
@pytest.mark.parametrize("plan", [*plans()])
def test_a_recorded_step_is_the_predicted_one(emulated, plan):
    timeline = run(emulated, plan)[0].recorded

    program, predicted = timeline.program, predicted_of(timeline.program, plan.costs)
    near = TOLERANCE * predicted.makespan_s
    (start_s, end_s), (expected_start_s, expected_end_s) = aligned(timeline), aligned(predicted)
    assert timeline.makespan_s == pytest.approx(predicted.makespan_s, abs=near)
    is_step, is_receive = program.op == Op.OPTIMIZER_STEP, IS_RECEIVE[program.op]
    is_launched = IS_SEND[program.op] | REDUCES_REPLICAS[program.op]
    runs = ~is_launched & ~is_receive
    # The record of the optimizer step begins when it is queued, and it waits for the reductions.
    assert start_s[~is_step] == pytest.approx(expected_start_s[~is_step], abs=near)
    assert end_s[runs] == pytest.approx(expected_end_s[runs], abs=near)
    # The record of a send ends when it is posted, and that of a reduction on a stream of its own when it is launched;
    # that of a receive when the host sees the message: no earlier than it is there, and at once where the rank waits.
    assert end_s[is_launched] == pytest.approx(start_s[is_launched], abs=near)
    assert (end_s[is_receive] > expected_end_s[is_receive] - near).all()
    transfers = Transfers.of(program)
    awaited = transfers.receives[transfers.is_awaited(timeline)]
    assert len(awaited)
    assert end_s[awaited] == pytest.approx(expected_end_s[awaited], abs=near)


@pytest.mark.parametrize("transfer_s", [0.0, TRANSFER_S])
def test_overlapped_pairs_on_two_streams_take_as_long_as_the_longer_of_the_two(emulated, transfer_s):
    costs = replace(costs_of(4, transfer_s), overlap_factor=0.5, reduce_s=(0.0,), optimizer_s=(0.0,))
    halves = (1.0,) * 4
    costs = replace(costs, forward_s=(2.0,) * 4, backward_input_s=halves, backward_weight_s=halves)

    timeline = run(emulated, Plan("dualpipe-v", 2, 6, costs, is_overlapped=True))[0].recorded

    predicted, is_compute = simulate(timeline.program, costs), timeline.program.is_compute
    assert timeline.program.joined.any()
    for found_s, expected_s in zip(aligned(timeline), aligned(predicted), strict=True):
        assert found_s[is_compute] == pytest.approx(expected_s[is_compute], abs=TOLERANCE * predicted.makespan_s)


@pytest.mark.feature("H3")
@pytest.mark.parametrize(
    ("run_ahead", "is_recorded"),
    [(1, False), (3, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, False), (1, True)])],
)
def test_the_host_leads_its_device_by_as_many_computations_as_it_may(emulated, run_ahead, is_recorded):
    """It queues one when that has ended which stands so many before it."""
    plan = replace(plan_of("gpipe", 0.0, run_ahead), is_recorded=is_recorded)
    ranks = run(emulated, plan)

    program = ps.lower(ps.build(plan.family, ranks=plan.num_ranks, microbatches=plan.num_microbatches))
    predicted = simulate(program, plan.costs)
    transfers = Transfers.of(program)
    arrivals_s = dict(zip(transfers.consumers.tolist(), predicted.end_s[transfers.receives].tolist(), strict=True))
    for rank, timed in enumerate(ranks):
        rows = predicted.compute_rows(rank).tolist()
        may_s = [0.0] * run_ahead + predicted.end_s[rows].tolist()
        if is_recorded:  # the host waits for receives itself
            may_s = [max(each, arrivals_s.get(row, 0.0)) for each, row in zip(may_s, rows, strict=False)]
        queued_s = [moment_s - ranks[0].queued_s[0] for moment_s in timed.queued_s]
        assert queued_s == pytest.approx(np.maximum.accumulate(may_s[: len(rows)]), abs=TOLERANCE * may_s[-1])
