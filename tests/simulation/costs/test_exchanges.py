"""The time of gathers and reductions shows where a rank waits for them; late replicas count for nothing."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from penstock.ir.awaits import gather_of_row
from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.deps import NONE
from penstock.ir.operations import Op
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.costs.exchanges import exchanges_s
from penstock.simulation.costs.fit import costs_from_timelines
from tests.simulation.drawing import row_of, sharded

GATHER_S, REDUCE_S = (3.0, 1.0, 2.0, 5.0), (4.0, 1.5, 2.5, 6.0)
COSTS = Costs.uniform(forward=0.25, backward=1.0, unshard_s=GATHER_S, reduce_s=REDUCE_S)


def simulated(program, costs=COSTS):
    stages = slice(program.num_stages)
    return simulate(program, replace(costs, unshard_s=costs.unshard_s[stages], reduce_s=costs.reduce_s[stages]))


def noted(program, costs=COSTS):
    """A simulated step as ranks would note it: the end of an exchange where they look for it, at the earliest."""
    timeline = simulated(program, costs)
    end_s, gathers = timeline.end_s.copy(), gather_of_row(program)
    for first, end in pairwise(program.offsets.tolist()):
        free_s = 0.0
        for row in range(first, end):
            if gathers[row] != NONE:
                end_s[gathers[row]] = max(end_s[gathers[row]], free_s)
            free_s = timeline.end_s[row] if program.is_compute[row] else free_s
        reductions = first + np.flatnonzero(REDUCES_REPLICAS[program.op[first:end]])
        end_s[reductions] = np.maximum(end_s[reductions], free_s)
    return replace(timeline, source="measured", end_s=end_s)


def interleaved(**options):
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    return lower(schedule, shard="full", **options)


def test_a_rank_that_waits_for_each_gather_sees_what_it_takes():
    found = exchanges_s([noted(interleaved(residency=1, look_ahead=0))])

    assert tuple(found[Op.UNSHARD]) == GATHER_S


@pytest.mark.parametrize(("forward_s", "found_s"), [(0.25, [3.0, 1.0]), (20.0, [3.0, 3.0])])
def test_a_gather_behind_another_one_begins_where_that_is_over_unless_it_was_over_before(forward_s, found_s):
    """The gather of stage 1 is launched at 0, begins at 3, and ends at 4; F0 takes until 3.25, or until 23.

    One that was over before it was looked for takes as long as others.
    """
    program = sharded("0UNSHARD 1UNSHARD 0F0 1F0 0RESHARD 1RESHARD")

    found = exchanges_s([noted(program, replace(COSTS, forward_s=(forward_s,)))])

    assert found[Op.UNSHARD].tolist() == found_s


def test_the_last_reduction_of_a_rank_is_waited_for_at_the_end_of_the_program():
    program = sharded("0F0 0B0 0REDUCE_GRAD")

    assert exchanges_s([noted(program)])[Op.REDUCE_GRADIENT].tolist() == [4.0]


def test_a_reduction_that_nobody_waited_for_takes_as_long_as_the_gather_of_its_stage():
    """It is over long before the rank has run all else."""
    program = sharded("0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD 1UNSHARD 1F1 1B1 1RESHARD")

    found = exchanges_s([noted(program, replace(COSTS, backward_s=(20.0,)))])

    assert found[Op.UNSHARD].tolist() == [3.0, 1.0]
    assert found[Op.REDUCE_GRADIENT].tolist() == [3.0, 0.0]


def test_one_that_is_over_when_the_rank_has_waited_for_the_one_before_was_not_waited_for():
    program = sharded("0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD")
    timeline = noted(program)
    end_s = timeline.end_s.copy()
    end_s[row_of(program, "1REDUCE_GRAD")] = end_s[row_of(program, "0REDUCE_GRAD")]

    assert exchanges_s([timeline])[Op.REDUCE_GRADIENT].tolist() == [4.0, 1.5]
    assert exchanges_s([replace(timeline, end_s=end_s)])[Op.REDUCE_GRADIENT].tolist() == [4.0, 4.0]


@pytest.mark.feature("H11")
def test_of_several_steps_the_one_without_late_replicas_counts():
    program = interleaved(residency=1, look_ahead=0)
    late = [noted(program, replace(COSTS, unshard_s=tuple(np.add(GATHER_S, seconds)))) for seconds in (7.0, 0.0, 2.0)]

    assert costs_from_timelines(late).unshard_s == GATHER_S


def test_a_reduction_that_blocks_its_rank_takes_its_time():
    program = lower(build("looped-bfs", ranks=1, microbatches=3, stages_per_rank=2))
    lasts_s = np.where(program.is_compute, 1.0, np.where(program.stage == 0, 5.0, 3.0))
    end_s = np.cumsum(lasts_s)

    timeline = replace(simulated(program), source="measured", start_s=end_s - lasts_s, end_s=end_s)

    assert exchanges_s([timeline])[Op.REDUCE_GRADIENT].tolist() == [5.0, 3.0]


@pytest.mark.parametrize("residency", [1, 2, None])
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_what_is_fitted_predicts_the_step_again(residency, look_ahead):
    costs = replace(COSTS, reduce_s=GATHER_S)  # of shards, both move the same bytes
    program = interleaved(residency=residency, look_ahead=look_ahead)
    timeline = simulate(program, costs)

    predicted = simulate(program, costs_from_timelines([noted(program, costs)]))

    assert predicted.step_s == pytest.approx(timeline.step_s, rel=0.25)
    assert row_of(program, "0UNSHARD") >= 0
