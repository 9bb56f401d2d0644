"""What costs expect of a block: on its stage, and on the mean one."""

from dataclasses import replace

import pytest

from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import blocks_of
from penstock.simulation.expected import ExpectedDurations
from tests.simulation.drawing import drawn

COSTS = Costs(forward_s=(1.0, 3.0), backward_s=(2.0, 6.0), microbatch_compute_factor=(1.0, 2.0), overlap_factor=0.5)
PROGRAM = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)


def expected(costs, source="predicted"):
    """By the text of a block: seconds on its stage, and on the mean stage."""
    timeline = replace(simulate(PROGRAM, costs), source=source)
    found = ExpectedDurations(timeline, costs)
    blocks = {str(PROGRAM.instruction(block.row)): block for block in blocks_of(timeline)}
    return {text: (found.on_its_stage_s(block), found.on_the_mean_stage_s(block)) for text, block in blocks.items()}


def test_a_stage_takes_its_own_time_for_its_microbatch():
    assert {text: own_s for text, (own_s, _) in expected(COSTS).items()} == {
        "0F0": 1, "0F1": 0.5 * (2 * 1 + 2), "0B1": 4, "1F0": 3, "1B0": 6, "1F1": 6, "1B1": 12,
    }  # fmt: skip


def test_the_mean_is_over_stages_and_microbatches():
    forward_s, backward_s = 2 * 1.5, 4 * 1.5

    assert {text: mean_s for text, (_, mean_s) in expected(COSTS).items()} == {
        "0F0": forward_s, "0F1": 0.5 * (forward_s + backward_s), "0B1": backward_s,
        "1F0": forward_s, "1B0": backward_s, "1F1": forward_s, "1B1": backward_s,
    }  # fmt: skip


@pytest.mark.parametrize(("source", "launch_s", "in_front_s"), [("predicted", 0.25, 0.75), ("measured", 0.0, 1.0)])
def test_a_predicted_computation_holds_its_launch_and_a_measured_one_stands_behind_it(source, launch_s, in_front_s):
    without, found = expected(COSTS, source), expected(replace(COSTS, launch_s=0.25), source)

    for text in without:
        num_rows = 2 if text == "0F1" else 1
        wanted = [seconds + num_rows * launch_s for seconds in without[text]]
        assert list(found[text]) == pytest.approx(wanted)
    timeline = replace(simulate(PROGRAM, COSTS), source=source)
    assert ExpectedDurations(timeline, replace(COSTS, launch_s=0.25)).launches_s(3) == in_front_s


def test_kinds_that_do_not_run_need_no_costs():
    assert expected(Costs(forward_s=(1.0,), backward_s=(2.0,)))["0B1"] == (2.0, 2.0)
