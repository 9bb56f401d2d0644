"""Ranks as processes, of which one is killed in a step, for test_lost_ranks.py."""

import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.execute.transport import TorchTransport
from tests.emulated.failing_steps import Ended, batch_of, fail_a_step, pipeline_with_fault
from tests.emulated.rank_processes import device_of, reports


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
