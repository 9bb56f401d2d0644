"""When a rank was full: by its limit, by what it holds, and by the first forward that could have run."""

import pytest

from penstock.errors import ConfigError
from penstock.placement import Placement
from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import blocks_of
from penstock.simulation.memory_blocked import NEVER, memory_blocked_since_s
from tests.simulation.drawing import drawn

ONE_AT_A_TIME = drawn("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", num_microbatches=3)


def blocked_since(program, limit, costs=None):
    """Since when the rank of each block was full, by the text of the block; without those where it never was."""
    costs = costs or Costs.uniform()
    timeline = simulate(program, costs)
    blocks = blocks_of(timeline)
    since_s = memory_blocked_since_s(timeline, costs, blocks, limit)
    found = zip(blocks, since_s, strict=True)
    return {str(program.instruction(block.row)): since for block, since in found if since != NEVER}


def test_without_a_limit_no_rank_is_full():
    assert blocked_since(ONE_AT_A_TIME, None) == {}


def test_the_first_stage_could_run_its_next_forward_from_the_beginning_on():
    since = blocked_since(ONE_AT_A_TIME, 1)

    assert since["0B0"] == since["0B1"] == -float("inf")
    assert "0B2" not in since  # no forward is left
    assert "0F1" not in since  # a forward waits for its own input


def test_a_rank_below_its_limit_is_not_full():
    assert blocked_since(ONE_AT_A_TIME, 2) == {}
    assert {text[0] for text in blocked_since(ONE_AT_A_TIME, [2, 1])} == {"1"}


@pytest.mark.parametrize(
    ("options", "arrival_s"),
    [
        ({}, 8.0),
        ({"transfer": 0.5}, 9.5),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0}, 9.5),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0, "microbatch_bytes_factor": (1, 1, 2)}, 10.0),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0, "is_exclusive": True}, 9.5),
    ],
)
def test_a_later_stage_could_run_its_next_forward_when_its_input_has_come(options, arrival_s):
    program = drawn("0F0 0B0 0F1 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", num_microbatches=3)

    since = blocked_since(program, [2, 1], Costs.uniform(**options))

    # 0F2 ends at 8 without transfers; the message is counted from its send on, however late its receive is posted.
    assert since["1B1"] == arrival_s


def test_the_earliest_of_all_later_forwards_counts():
    program = drawn("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1",
                    placement=Placement.vee(2), num_microbatches=2)  # fmt: skip

    since = blocked_since(program, 2)

    assert since["3B0"] == -float("inf")  # 0F1, though 3F1 comes later
    assert "0B0" not in since  # one of two is free again


def test_after_the_input_part_of_a_backward_its_activation_still_counts():
    program = drawn("0F0 0I0 0W0 0F1 0I1 0W1", num_microbatches=2)

    assert set(blocked_since(program, 1)) == {"0I0", "0W0"}


def test_a_slice_is_ready_when_the_one_before_it_has_run():
    program = drawn("0F0 0F0.1 0B0.1 0B0 0F1 0F1.1 0B1.1 0B1", num_microbatches=2, num_slices=2)

    assert blocked_since(program, 2)["0B0.1"] == -float("inf")


def test_limits_for_another_number_of_ranks_are_refused():
    with pytest.raises(ConfigError, match="memory_limit: 3 values for 2 ranks; give one, or one per rank"):
        blocked_since(ONE_AT_A_TIME, [1, 2, 3])


@pytest.mark.parametrize("limit", [-1, 1.5, True, "3", float("nan"), [1, -2]])
def test_limits_that_are_no_numbers_of_activations_are_refused(limit):
    with pytest.raises(ConfigError, match=r"memory_limit: .*; give whole numbers of 0 or more"):
        blocked_since(ONE_AT_A_TIME, limit)
