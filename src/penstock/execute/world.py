"""Finds out in which world a pipeline runs: this process alone, or a group of torch.distributed."""

import torch
import torch.distributed as dist

from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.torch_dist import TorchTransport


def default_transport(group: dist.ProcessGroup | None, deadline_s: float) -> Transport:
    """Return wires within the group, or in the default group if there is one, else for one rank."""
    if not _is_distributed():
        return LocalTransport.create(1, deadline_s)[0]
    return TorchTransport(group, deadline_s=deadline_s, device=default_device(group))


def shares_process(transport: Transport) -> bool:
    """Whether other ranks are threads of this process, which may hold the very same modules."""
    return isinstance(transport, LocalTransport) and transport.num_ranks > 1


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the current CUDA device where the group's backend is NCCL, else the CPU."""
    if _is_distributed() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
