"""What costs expect of a block: on its stage, and on the mean one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import blocks_of
from penstock.simulation.expected import ExpectedDurations
from tests.simulation.drawing import drawn
from tests.simulation.events import programs, uneven_costs

COSTS = Costs(forward_s=(1.0, 3.0), backward_s=(2.0, 6.0), microbatch_compute_factor=(1.0, 2.0), overlap_factor=0.5)
PROGRAM = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)


def expected(costs):
    """By the text of a block: seconds on its stage, and on the mean stage."""
    found = ExpectedDurations(PROGRAM, costs)
    blocks = {str(PROGRAM.instruction(block.row)): block for block in blocks_of(simulate(PROGRAM, costs))}
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


def test_launches_come_before_a_block_and_are_no_part_of_it():
    launched = replace(COSTS, launch_s=0.25)
    single, pair = (block for block in blocks_of(simulate(PROGRAM, COSTS))[:2])

    assert expected(launched) == expected(COSTS)
    assert ExpectedDurations(PROGRAM, launched).launches_s(single, 3) == 4 * 0.25
    assert ExpectedDurations(PROGRAM, launched).launches_s(pair, 3) == 5 * 0.25


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_a_predicted_block_takes_what_is_expected(program, seed):
    costs = uneven_costs(program, seed)
    found = ExpectedDurations(program, costs)

    for block in blocks_of(simulate(program, costs)):
        assert block.end_s - block.start_s == found.on_its_stage_s(block)


def test_kinds_that_do_not_run_need_no_costs():
    assert expected(Costs(forward_s=(1.0,), backward_s=(2.0,)))["0B1"] == (2.0, 2.0)
