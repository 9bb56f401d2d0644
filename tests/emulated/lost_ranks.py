"""Ranks as processes, of which one raises in a step and is killed in a later one, for test_lost_ranks.py."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.execute.transport import TorchTransport
from tests.emulated.failing_steps import Ended, batch_of, fail_a_step, pipeline_with_fault
from tests.emulated.rank_processes import device_of, reports


@dataclass
class Survived:
    """What a rank has seen that was not killed."""

    losses: list
    """Of the steps before and behind the one in which a layer raised."""
    raised: Ended
    reports: list
    """Of the checker, until the rank was killed."""
    lost: Ended
    next_error: str


def lose_a_rank(rank, failing):
    """Take a step, one in which a layer of the culprit raises, one more, one in which the culprit dies, and another."""
    device, generator = device_of(rank), torch.Generator().manual_seed(1)
    batches = [batch_of(generator, device) for _ in range(5)]
    transport = TorchTransport(deadline_s=failing.deadline_s, device=device)
    pipeline, fault = pipeline_with_fault(failing, device, transport, dist.group.WORLD.get_group_store())

    losses, raised, lost = [take_step(pipeline, batches[0])], Ended(), Ended()
    fault.kind = "raises"
    fail_a_step(pipeline, fault, failing, batches[1], raised)
    losses.append(take_step(pipeline, batches[2]))
    found = reports()

    fault.kind, fault.calls = "dies", 0
    fail_a_step(pipeline, fault, failing, batches[3], lost)
    transport.deadline_s = failing.deadline_s
    next_error = ""
    try:
        take_step(pipeline, batches[4])
    except PipelineError as error:
        next_error = str(error)
    pipeline.close()
    return Survived(losses, raised, found, lost, next_error)


def take_step(pipeline, batch):
    for parameter in pipeline.parameters():
        parameter.grad = None
    return pipeline.step(batch[0], target=batch[1]).loss.item()


def losses_without_failure(rank, failing):
    """Return the losses of the same steps where nothing fails."""
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
    batches = [batch_of(generator, device) for _ in range(5)]
    transport = TorchTransport(deadline_s=failing.deadline_s)
    store = dist.group.WORLD.get_group_store()
    pipeline, _ = pipeline_with_fault(replace(failing, run_ahead=None), device, transport, store)
    losses = [take_step(pipeline, batches[number]) for number in (0, 2)]
    pipeline.close()
    return losses
