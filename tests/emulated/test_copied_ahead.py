"""Batches in the host's memory are copied ahead of the computations that read them: the same bits, and no report."""

import pytest

from tests.emulated.copied_ahead import (
    COPY_S,
    FORWARD_S,
    NUM_MICROBATCHES,
    SHARE_BYTES,
    device_bytes_of_steps,
    evaluated_in,
    queues_of_copies,
    waits_of_the_host,
    what_a_failed_step_leaves,
)
from tests.emulated.failing_steps import Failing, train_around_a_failure
from tests.emulated.pipelines import Cell, expect_equal_training
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated

CELLS = [
    Cell("1f1b", "plain", 2, memory="host"),
    Cell("gpipe", "variable shapes", 3, 1, memory="pinned"),
    Cell("zb-h1", "late weights", 2, 2, memory="host"),
    Cell("interleaved-1f1b", "recompute", 2, memory="pinned"),
    Cell("seq1f1b", "slices", 2, 1, memory="host"),
    Cell("seq1f1b", "slices", 3, memory="pinned"),
    Cell("zbv", "dropout", 4, 2, memory="pinned"),
    Cell("dualpipe-v", "overlapped pairs", 2, memory="pinned"),
    Cell("dualpipe-v", "main gradients", 3, 2, memory="host"),
]


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    "cell", [*CELLS[:2], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[2:])], ids=str
)
def test_a_training_on_batches_of_the_host_is_the_cpus_to_the_bit(emulated, cell):
    expect_equal_training(emulated, cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "policy", "seed"), [(CELLS[1], "eager", 0), (CELLS[5], "random", 7), (CELLS[7], "random", 8)], ids=str
)
def test_no_order_in_which_the_queues_run_changes_a_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, cell, policy, seed)


@pytest.mark.full
@pytest.mark.parametrize(("policy", "seed"), POLICIES[1:])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_policy_changes_a_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, cell, policy, seed)


@pytest.mark.feature("H1")
@pytest.mark.parametrize(("form", "memory"), [("whole", "host"), ("whole", "pinned"), ("stream", "host")])
def test_the_copy_of_a_microbatch_runs_beside_the_computation_of_the_one_before_it(emulated, form, memory):
    """On the simulated clock: only the first copy is waited for. One after the other would take copies + forwards."""
    (took_s,) = emulated.run(evaluated_in, form, memory)

    least_s = COPY_S + NUM_MICROBATCHES * FORWARD_S
    assert least_s <= took_s < least_s + 0.1 * COPY_S


def test_copies_have_a_stream_of_their_own_and_each_is_queued_once(emulated):
    ((of_copies, of_computations),) = emulated.run(queues_of_copies, policy="lazy")

    # 3 per microbatch: inputs, mask and target; and a table, once.
    assert of_copies == {"own": 3 * NUM_MICROBATCHES + 1}
    assert set(of_computations) == {"current"}


def test_the_host_waits_for_no_copy(emulated):
    on_device, of_host = (emulated.attempt(waits_of_the_host, memory).host_waits for memory in ("device", "host"))

    assert of_host == on_device


@pytest.mark.feature("H1")
@pytest.mark.parametrize(("memory", "policy"), [("host", "lazy"), ("pinned", "eager")])
def test_the_device_holds_two_microbatches_and_never_the_batch(emulated, memory, policy):
    """The one that is computed with, and the memory for the next one; however far the host is ahead."""
    (most_bytes,) = emulated.run(device_bytes_of_steps, memory, policy=policy)

    assert 2 * SHARE_BYTES <= most_bytes < 3 * SHARE_BYTES


def test_a_failed_step_leaves_nothing_on_the_device_and_the_batch_to_the_caller(emulated):
    ((before, behind, losses),) = emulated.run(what_a_failed_step_leaves, policy="lazy")

    assert behind == before
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "run_ahead"), [("raises", None), ("late", 2)])
def test_a_batch_is_the_callers_again_where_another_rank_has_failed(emulated, kind, run_ahead):
    failing = Failing(kind, run_ahead=run_ahead, memory="pinned")

    found = emulated.run(train_around_a_failure, failing, "emu", num_ranks=3, timeout_s=60)
    expected = emulated.run(train_around_a_failure, Failing(None), "cpu", num_ranks=3, timeout_s=60)

    assert [ended.losses for ended in found] == [ended.losses for ended in expected]
    assert [ended.weights for ended in found] == [ended.weights for ended in expected]
