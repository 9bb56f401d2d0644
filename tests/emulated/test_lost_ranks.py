"""A process that is killed while the devices of others wait for it is named in time."""

import signal

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.execute.transport import TorchTransport
from tests.emulated.failing_steps import Ended, Failing, batch_of, fail_a_step, pipeline_with_fault
from tests.emulated.rank_processes import device_of, processes, reports

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def lose_a_rank(rank, failing):
    """Take a step, one in which the culprit dies, and another.

    Return what the checker has reported before the culprit died, how the step ended, and the error of the last one.
    """
    device, generator = device_of(rank), torch.Generator().manual_seed(1)
    transport = TorchTransport(deadline_s=failing.deadline_s, device=device)
    pipeline, fault = pipeline_with_fault(failing, device, transport, dist.group.WORLD.get_group_store())
    batches = [batch_of(generator, device) for _ in range(3)]
    pipeline.step(batches[0][0], target=batches[0][1])
    early_reports, ended = reports(), Ended()
    fail_a_step(pipeline, fault, failing, batches[1], ended)
    transport.deadline_s = failing.deadline_s
    next_error = ""
    try:
        pipeline.step(batches[2][0], target=batches[2][1])
    except PipelineError as error:
        next_error = str(error)
    pipeline.close()
    return early_reports, ended, next_error


DEADLINE_S = 1.0
CULPRIT = 1


@pytest.mark.feature("X6")
@pytest.mark.parametrize(("place", "run_ahead", "instruction"), [("forward", None, "1F2"), ("backward", 2, "1B2")])
def test_a_killed_rank_is_named_by_the_deadline(emulated_is_there, place, run_ahead, instruction):
    failing = Failing("dies", place, CULPRIT, run_ahead=run_ahead, deadline_s=DEADLINE_S)
    with processes(failing.num_ranks) as pool:
        outcome = pool.attempt(lose_a_rank, failing, timeout_s=60)

    assert outcome.exit_codes == {CULPRIT: -signal.SIGKILL}, str(outcome)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    for early_reports, ended, next_error in outcome.results.values():
        assert early_reports == []
        assert (ended.blamed, ended.error) == (CULPRIT, "PeerLost")
        assert f"is gone, in {instruction}" in ended.text
        assert "the ranks could not start afresh" in next_error
