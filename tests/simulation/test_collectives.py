"""Collectives: gathers and reductions in one queue beside the computations, barriers of tied groups."""

from dataclasses import replace

import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.simulation.drawing import ends, sharded, starts


def simulated(program, **costs):
    return simulate(program, Costs.uniform(**costs))


def members(num_ranks, *groups, **options):
    return lower(build("gpipe", ranks=num_ranks, microbatches=1), tied_groups=groups, **options)


COPIES = sharded("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0F3 0B0 0B1 0B2 0B3")
TIMES = {
    # The gather of stage 1 comes after that of stage 0.
    "the first computation of a stage waits for its gather and others do not": (
        simulated(sharded("0UNSHARD 1UNSHARD 0F0 1F0"), unshard_s=(2.0, 0.5)),
        {"0UNSHARD": 0, "1UNSHARD": 0, "0F0": 2, "1F0": 3}, {"1UNSHARD": 2.5},
    ),
    "a unit takes the time of all its stages": (
        simulated(
            replace(sharded("0UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD"), units=((0, 1),)),
            unshard_s=(2.0, 0.5), reduce_s=(1.0, 2.0),
        ),
        {"0F0": 2.5, "1F0": 3.5}, {"0REDUCE_GRAD": 2.5 + 6 + 3},
    ),
    "an optimizer step waits for the reductions of its own rank only": (
        simulated(members(2, optimizer_step=True), reduce_s=(3.0, 1.0)),
        {"0STEP": 6 + 3, "1STEP": 4 + 1}, {"0B0": 6, "1B0": 4},
    ),
    "members wait in a tied reduction until the last has come": (
        simulated(members(3, (0, 2), optimizer_step=True), tied_reduce_s=(0.5,), reduce_s=(0.0, 0.0, 0.25)),
        {"0REDUCE_TIED0": 9, "2REDUCE_TIED0": 5.25, "0STEP": 9.5, "1STEP": 7, "2STEP": 9.5},
        {"0B0": 9, "0REDUCE_TIED0": 9.5, "2REDUCE_TIED0": 9.5},
    ),
    "what reads waits for its reload and that for the copies before it": (
        simulated(COPIES, offload_s=(3.0,), reload_s=(2.5,)),
        {"0RELOAD0": 3, "0F3": 3, "0B0": 6.5, "0B1": 8.5}, {"0OFFLOAD0": 4, "0RELOAD0": 6.5},
    ),
    "copies and gathers do not wait for each other": (
        simulated(
            sharded("0UNSHARD 0F0 0OFFLOAD0 1UNSHARD 0F1 0RELOAD0 1F1 1F0 1B0 0B0 1B1 0B1"),
            unshard_s=(2.0, 4.0), offload_s=(0.5,), reload_s=(0.5,),
        ),
        {}, {"0OFFLOAD0": 3.5, "1UNSHARD": 7, "0RELOAD0": 4.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("timeline", "start_s", "end_s"), TIMES.values(), ids=TIMES)
def test_collectives_and_copies_start_and_end_when_they_can(timeline, start_s, end_s):
    assert {text: starts(timeline)[text] for text in start_s} == start_s
    assert {text: ends(timeline)[text] for text in end_s} == end_s


@pytest.mark.feature("X23")
def test_a_member_comes_to_a_tied_reduction_when_its_own_reductions_are_over():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_TIED0", "2F0 2B0 2REDUCE_TIED0")

    timeline = simulate(program, Costs.uniform(reduce_s=(7.0,), tied_reduce_s=(0.5,)))

    assert (ends(timeline)["1REDUCE_GRAD"], ends(timeline)["0B0"]) == (7 + 7, 9)
    assert (starts(timeline)["0REDUCE_TIED0"], starts(timeline)["2REDUCE_TIED0"]) == (14, 5)
    assert ends(timeline)["0REDUCE_TIED0"] == ends(timeline)["2REDUCE_TIED0"] == 14.5
