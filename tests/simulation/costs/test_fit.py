"""Costs fitted to a timeline predict that timeline again."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.ir.action import Kind
from penstock.ir.instruction import Op
from penstock.ir.operations import IS_COPY
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.costs import Channel, Spread
from penstock.simulation.costs.fit import SplitShares, costs_from_timeline, costs_from_timelines
from tests.simulation.drawing import later
from tests.simulation.slow_data import with_slow_data


def simulated(name="1f1b", costs=None, ranks=3, microbatches=6, **options):
    program = lower(build(name, ranks=ranks, microbatches=microbatches, **options))
    return simulate(program, costs or Costs.uniform())


UNEVEN = Costs(
    forward_s=(1.0, 2.0, 1.5),
    backward_s=(2.0, 3.0, 2.5),
    backward_input_s=(1.0, 1.5, 1.25),
    backward_weight_s=(1.0, 1.5, 1.25),
    latency_s=0.25,
    activation_bytes=(5, 6, 7),
    weight_context_bytes=(1, 2, 3),
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("launch_s", [0.0, 0.01])
def test_the_fitted_costs_predict_the_timeline_again_and_without_launches_are_its_own(name, launch_s):
    timeline = simulated(name, replace(UNEVEN, launch_s=launch_s))

    fitted = costs_from_timeline(timeline)

    assert simulate(timeline.program, fitted).makespan_s == pytest.approx(timeline.makespan_s, rel=0.01)
    assert launch_s or fitted == UNEVEN


def test_waits_for_data_count_neither_as_launches_nor_as_transfers():
    program = lower(build("1f1b", ranks=2, microbatches=6))
    costs = Costs(forward_s=(1.0, 2.0), backward_s=(2.0, 3.0), latency_s=0.25, launch_s=0.01)
    rows = np.flatnonzero((program.op == Op.FORWARD) & (program.microbatch > 0))

    slow = with_slow_data(program, costs, dict.fromkeys(rows.tolist(), 5.0))
    found = costs_from_timeline(slow)

    assert 0 <= found.launch_s <= costs.launch_s
    assert found.latency_s == pytest.approx(costs.latency_s, abs=2 * costs.launch_s)


def test_a_message_that_nobody_waited_for_tells_no_latency():
    timeline = simulated("forward-only", Costs.uniform(transfer=0.25), ranks=2)

    late = later(timeline, np.where(timeline.program.rank_of_row == 1, 100.0, 0.0))

    assert costs_from_timeline(timeline).latency_s == 0.25
    assert costs_from_timeline(late).latency_s == 0.0


def test_a_kind_that_did_not_run_follows_from_the_others():
    costs = costs_from_timeline(simulated("1f1b", UNEVEN))
    forward_only = costs_from_timeline(simulated("forward-only", UNEVEN))

    assert costs.backward_input_s == tuple(whole / 2 for whole in costs.backward_s)
    assert forward_only.backward_s == forward_only.backward_weight_s == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "shares", [SplitShares(1.5, 0.75, 0.5), SplitShares((1.0, 1.5, 1.0), (0.75, 0.5, 0.5), (0.25, 0.5, 0.5))]
)
def test_parts_that_did_not_run_have_their_shares_of_the_whole_of_all_stages_or_of_each(shares):
    costs = costs_from_timelines([simulated("1f1b", UNEVEN)], shares=shares)

    assert costs.forward_s == UNEVEN.forward_s
    assert costs.split_forward_s == pytest.approx(np.multiply(shares.forward, UNEVEN.forward_s))
    assert costs.backward_input_s == pytest.approx(np.multiply(shares.input, UNEVEN.backward_s))
    assert costs.backward_weight_s == pytest.approx(np.multiply(shares.weight, UNEVEN.backward_s))


def test_whole_backwards_and_their_forwards_follow_from_split_ones():
    shares = SplitShares(1.25, 0.75, 0.5)

    costs = costs_from_timelines([simulated("zb-h1", UNEVEN)], shares=shares)

    assert costs.split_forward_s == UNEVEN.forward_s
    assert costs.forward_s == pytest.approx([seconds / 1.25 for seconds in UNEVEN.forward_s])
    assert costs.backward_s == pytest.approx([seconds / 1.25 for seconds in UNEVEN.backward_s])
    assert costs.backward_input_s == UNEVEN.backward_input_s


def test_shares_are_those_of_measured_costs():
    costs = Costs(
        forward_s=(1.0, 3.0),
        split_forward_s=(2.0, 3.0),
        backward_s=(4.0, 4.0),
        backward_input_s=(3.0, 3.0),
        backward_weight_s=(1.0, 3.0),
    )

    assert SplitShares.of(costs) == SplitShares(1.25, 0.75, 0.5)
    assert SplitShares.of(replace(costs, split_forward_s=())) == SplitShares(1.0, 0.75, 0.5)
    assert SplitShares.of(replace(costs, backward_s=())) is None
    assert SplitShares.of(Costs(forward_s=(1.0,), backward_s=(2.0,))) is None


def test_costs_per_layer_say_the_shares_of_each_stage():
    layers = LayerCosts(
        forward=[1.0, 1.0, 2.0], backward=[2.0, 2.0, 4.0], backward_input=[1.0, 1.0, 3.0], backward_weight=1.0
    )

    assert SplitShares.of(layers, [range(2), range(2, 3)]) == SplitShares((1.0, 1.0), (0.5, 0.75), (0.5, 0.25))
    assert SplitShares.of(layers) == SplitShares(1.0, 0.625, 0.375)
    assert SplitShares.of(layers, [range(4)]) == SplitShares(1.0, 0.625, 0.375)  # a split of other layers


def test_what_the_bytes_of_a_message_take_is_no_latency():
    """The first output has 4 bytes, the second 8, and so have their gradients."""
    sized = replace(UNEVEN, message_bytes=(4, 8, 0), bandwidth_bytes_per_s=16.0)
    timeline = simulated("1f1b", sized)

    bandwidths = dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], 16.0)
    costs = costs_from_timelines([timeline], message_bytes=(4, 8, 0), bandwidths=bandwidths)

    assert (costs.latency_s, costs.bandwidth_bytes_per_s, costs.channels) == (0.25, 16.0, ())
    assert costs.is_exclusive
    assert simulate(timeline.program, costs).makespan_s == timeline.makespan_s
    assert costs_from_timeline(timeline).channels != ()


def test_a_channel_that_is_slower_than_the_usual_one_or_of_another_bandwidth_is_told_apart():
    slow = costs_from_timeline(simulated("1f1b", replace(UNEVEN, channels=(Channel(1, 2, 0.75),))))
    bandwidths = {(0, 1): 16.0, (1, 0): 16.0, (1, 2): 4.0, (2, 1): 16.0}
    channels = (Channel(1, 2, 0.25, 4.0),)
    sized = replace(UNEVEN, message_bytes=(4, 8, 0), bandwidth_bytes_per_s=16.0, channels=channels)

    costs = costs_from_timelines([simulated("1f1b", sized)], message_bytes=(4, 8, 0), bandwidths=bandwidths)

    assert (slow.latency_s, slow.channels) == (0.25, (Channel(1, 2, 0.75),))
    assert (costs.latency_s, costs.channels) == (0.25, (Channel(1, 2, 0.25, 4.0, is_exclusive=True),))


def test_several_timelines_count_as_one_sample_with_its_spread():
    fast, slow = (simulated("1f1b", Costs.uniform(forward=forward, backward=4.0), ranks=1) for forward in (1.0, 2.0))

    costs = costs_from_timelines([fast, slow, slow])

    assert costs.forward_s == pytest.approx((5 / 3,))
    assert costs.spreads == (Spread(Kind.FORWARD, 0, 2.0, 1.0),)


def test_launches_count_for_all_instructions_between_computations():
    """Computations start at once, messages take the host a second each to post: the mean over all is a launch."""
    timeline = simulated("1f1b", Costs.uniform(forward=10.0, backward=10.0), ranks=2, microbatches=8)
    program = timeline.program
    delay_s = np.zeros(program.num_instructions)
    for rank in range(2):
        rows = slice(*program.offsets[rank : rank + 2])
        delay_s[rows] = np.cumsum(~program.is_compute[rows])

    launch_s = costs_from_timeline(later(timeline, delay_s)).launch_s

    assert 0.4 < launch_s < 0.75


def test_a_rank_shares_its_optimizer_step_among_its_stages():
    schedule = build("interleaved-1f1b", ranks=2, microbatches=2, stages_per_rank=2)
    program = lower(schedule, optimizer_step=True)
    timeline = simulate(program, replace(Costs.uniform(), optimizer_s=(1.0, 5.0, 2.0, 5.0)))

    assert costs_from_timeline(timeline).optimizer_s == (1.5, 5.0, 1.5, 5.0)


@pytest.mark.feature("B14")
def test_the_seconds_of_loads_are_those_that_bring_a_microbatch():
    program = lower(build("zbv", ranks=2, microbatches=3), loads=True)

    timeline = simulate(program, Costs.uniform(load_s=(0.5, 9.0, 9.0, 0.25)))

    assert timeline.makespan_s == simulate(program, Costs.uniform(load_s=(0.5, 0, 0, 0))).makespan_s
    assert costs_from_timeline(timeline).load_s == (0.5, 0.0, 0.0, 0.0)


REDUCED = lower(build("looped-bfs", ranks=1, microbatches=3, stages_per_rank=2))
OFFLOADED = lower(build("gpipe", ranks=1, microbatches=5), offload=[0])


@pytest.mark.parametrize(
    ("program", "others_s"),
    [(REDUCED, 5.0), (OFFLOADED, np.where(IS_COPY[OFFLOADED.op], 5.0, 0.0))],
    ids=["reductions", "copies"],
)
def test_what_holds_up_its_rank_between_computations_is_no_launch(program, others_s):
    lasts_s = np.where(program.is_compute, 1.0, others_s)
    end_s = np.cumsum(lasts_s + 0.125)

    costs = costs_from_timeline(Timeline(program, "measured", end_s - lasts_s, end_s))

    assert costs.launch_s == pytest.approx(0.125)


def test_a_wait_for_a_gather_is_no_launch():
    schedule = build("looped-bfs", ranks=1, microbatches=2, stages_per_rank=4, forward_only=True)
    program = lower(schedule, shard="full", residency=None, look_ahead=1)  # the first of each stage waits, none else
    timeline = simulate(program, Costs.uniform(unshard_s=(7.0,)))

    costs = costs_from_timeline(later(timeline, np.cumsum(np.full(program.num_rows, 0.125))))

    assert costs.launch_s == pytest.approx(0.125)
