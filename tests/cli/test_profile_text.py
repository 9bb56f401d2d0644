"""A profile in words: seconds with their spread, channels, and the bottleneck."""

from dataclasses import replace

import pytest

from penstock.cli.profile_text import bottleneck, profile_text
from penstock.execute.observing.rank_memory import MemoryPoint, RankMemory, StageMemory
from penstock.ir.action import Kind
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel, Spread
from penstock.train.profiling import Profile

COSTS = Costs(
    forward_s=(0.010, 0.014),
    backward_s=(0.020, 0.028),
    latency_s=1e-4,
    channels=(Channel(1, 0, 2e-4),),
    launch_s=5e-5,
    spreads=(Spread(Kind.FORWARD, 0, 0.0098, 0.0005),),
)
CHANNELS = (Channel(0, 1, 3e-5, 2.0 * 2**30), Channel(1, 0, 4e-5, float("inf")))


def profile_of(costs=COSTS, channels=CHANNELS, name="1f1b", **shape):
    program = lower(build(name, **({"ranks": 2, "microbatches": 4} | shape)))
    return Profile(
        rank=0, costs=costs, layer_costs=LayerCosts(split=(3, 4)), program=program, num_steps=5, channels=channels
    )


def test_everything_that_was_measured_is_told_with_its_unit():
    lines = profile_text(profile_of()).split("\n")

    assert [line.split() for line in lines if set(line) != {"─"}] == [
        ["1f1b,", "5", "recorded", "steps,", "split", "3,4"],
        ["stage", "rank", "kind", "usual", "median", "middle", "half", "within"],
        ["0", "0", "forward", "10.0", "ms", "9.80", "ms", "500", "µs"],
        ["0", "0", "backward", "20.0", "ms", "20.0", "ms", "0.00", "ms"],
        ["1", "1", "forward", "14.0", "ms", "14.0", "ms", "0.00", "ms"],
        ["1", "1", "backward", "28.0", "ms", "28.0", "ms", "0.00", "ms"],
        [],
        ["channel", "latency", "latency", "of", "a", "ping", "bandwidth"],
        ["0", "to", "1", "100", "µs", "30.0", "µs", "2.00", "GiB/s"],
        ["1", "to", "0", "200", "µs", "40.0", "µs", "-"],
        [],
        ["launch:", "50.0", "µs", "of", "the", "host", "for", "each", "instruction"],
        [],
        *[line.split() for line in lines[-1:]],
    ]


def test_only_what_ran_and_was_measured_is_told():
    split = replace(COSTS, backward_input_s=(0.01,), backward_weight_s=(0.01,))
    alone = profile_text(profile_of(Costs(forward_s=(1.0,), backward_s=(2.0,)), channels=(), ranks=1))
    without_latency = profile_text(profile_of(replace(COSTS, latency_s=0.0)))
    noisy = profile_text(profile_of(replace(COSTS, spreads=(Spread(Kind.FORWARD, 1, 0.014, 0.005),))))
    stage = StageMemory(0, 1024, 1024, 2, 4096, 0)
    memory = (RankMemory(0, (stage,), 0, 0, None, 2, (MemoryPoint("begin", 1024, None, None),)),)

    for name in ("1f1b", "zb-h1"):
        text = profile_text(profile_of(split, name=name))
        assert ("backward input" in text) == ("backward weight" in text) == (name == "zb-h1")
    assert ("channel" in alone, "launch" in alone) == (False, True)
    # A latency that was not found has the unit of the ping beside it.
    assert ["0", "to", "1", "0.00", "µs", "30.0", "µs"] in [line.split()[:7] for line in without_latency.split("\n")]
    busy = "busy machine: the middle half of equal computations of stage 1 on rank 1 spreads"
    assert noisy.split("\n\n")[-2].startswith(busy)
    assert "memory, when a rank holds most" in profile_text(replace(profile_of(), memory=memory))
    assert not {"busy", "memory"} & set(profile_text(profile_of()).split())


EVEN = replace(COSTS, forward_s=(0.010, 0.0101), backward_s=(0.020,))
SEVERAL = Costs(forward_s=(3.0, 1.0, 1.0, 4.0), backward_s=(0.0,))
WAIT = "times the mean rank, and all others wait for it"


@pytest.mark.parametrize(
    ("costs", "shape", "told"),
    [
        (COSTS, {}, f"bottleneck: stage 1 on rank 1 takes 42.0 ms a microbatch, 1.17 {WAIT}"),
        (EVEN, {}, "no bottleneck: every rank computes for about 30.1 ms a microbatch"),
        (
            SEVERAL,
            {"name": "interleaved-1f1b", "stages_per_rank": 2},
            f"bottleneck: stage 3 on rank 1 takes 4.00 s a microbatch; rank 1 has most to do, 1.11 {WAIT}",
        ),
    ],
    ids=["the stage that takes longest", "none of even stages", "the rank with most to do too"],
)
def test_the_bottleneck_is_told(costs, shape, told):
    assert bottleneck(profile_of(costs, **shape)) == told


def test_what_was_measured_with_split_backwards_is_told_apart():
    split = replace(
        COSTS,
        split_forward_s=(0.012, 0.016),
        backward_input_s=(0.015,),
        backward_weight_s=(0.01,),
        spreads=(Spread(Kind.BACKWARD_INPUT, 0, 0.014, 0.001),),
    )

    lines = [" ".join(line.split()) for line in profile_text(profile_of(split)).split("\n")]

    assert "0 0 backward input, where backwards are split 15.0 ms 14.0 ms 1.00 ms" in lines
    assert "1 1 forward, where backwards are split 16.0 ms" in lines
