"""Costs fitted to a timeline predict that timeline again."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.ir.instruction import Op
from penstock.ir.timeline import Timeline
from penstock.lower import lower
from penstock.schedules import build
from penstock.simulate import Costs, simulate
from penstock.simulate.fit import costs_from_timeline


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
def test_a_timeline_without_launch_costs_gives_its_costs_and_sizes_back(name):
    assert costs_from_timeline(simulated(name, UNEVEN)) == UNEVEN


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("launch_s", [0.0, 0.01])
def test_the_fitted_costs_predict_the_timeline_again(name, launch_s):
    timeline = simulated(name, replace(UNEVEN, launch_s=launch_s))

    predicted = simulate(timeline.program, costs_from_timeline(timeline))

    assert predicted.makespan_s == pytest.approx(timeline.makespan_s, rel=0.01)


def test_one_slow_instruction_changes_no_duration():
    timeline = simulated(costs=UNEVEN)
    last = np.flatnonzero(timeline.program.op == Op.BACKWARD)[-1]
    end_s = timeline.end_s.copy()
    end_s[last] += 100.0

    slowed = Timeline(timeline.program, "measured", timeline.start_s, end_s, *[np.zeros(3, np.int64)] * 2)

    assert costs_from_timeline(slowed).backward_s == UNEVEN.backward_s


def test_gaps_before_computations_that_wait_for_nothing_are_launches():
    timeline = simulated(ranks=1, microbatches=4, costs=Costs.uniform(backward=2.0))
    shift_s = 0.5 * np.arange(timeline.program.num_instructions)

    spread = replace(timeline, start_s=timeline.start_s + shift_s, end_s=timeline.end_s + shift_s)

    assert costs_from_timeline(spread).launch_s == pytest.approx(0.5)
    assert costs_from_timeline(spread).backward_s == (2.0,)


def test_a_message_that_nobody_waited_for_tells_no_latency():
    timeline = simulated("forward-only", Costs.uniform(transfer=0.25), ranks=2)
    is_late = timeline.program.rank_of_row == 1
    late_s = np.where(is_late, 100.0, 0.0)

    late = replace(timeline, start_s=timeline.start_s + late_s, end_s=timeline.end_s + late_s)

    assert costs_from_timeline(timeline).latency_s == 0.25
    assert costs_from_timeline(late).latency_s == 0.0


def test_a_kind_that_did_not_run_follows_from_the_others():
    costs = costs_from_timeline(simulated("1f1b", UNEVEN))
    forward_only = costs_from_timeline(simulated("forward-only", UNEVEN))

    assert costs.backward_input_s == tuple(whole / 2 for whole in costs.backward_s)
    assert forward_only.backward_s == forward_only.backward_weight_s == (0.0, 0.0, 0.0)
