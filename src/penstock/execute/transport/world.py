"""Finds out in which world a pipeline runs: this process alone, or a group of torch.distributed."""

import torch
import torch.distributed as dist

from penstock.execute.accelerator import current_device, queued_backend
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.torch_dist import TorchTransport
from penstock.execute.transport.torchrun import OF_PROCESS, join_default_group


def default_transport(
    group: dist.ProcessGroup | None,
    deadline_s: float,
    *,
    device: torch.device | str | None = None,
    coalesces: bool = False,
    one_stream: bool = False,
) -> Transport:
    """Return a transport within the group, or in the default group if there is one, else for one rank.

    Where torchrun has started this process and nobody has made the default group, it is made, for messages between
    tensors on `device`; the last transport that is closed destroys it. `coalesces` and `one_stream` are those of
    `TorchTransport`.

    Raises:
        ConfigError: torchrun's variables are wrong. PeerLost, DeadlineExceeded, PipelineError: a rank does not come.
    """
    join_default_group(torch.device(device or "cpu"), deadline_s)
    if not _is_distributed():
        return LocalTransport.create(1, deadline_s)[0]
    return group_transport(group, deadline_s, device=device, coalesces=coalesces, one_stream=one_stream)


def group_transport(
    group: dist.ProcessGroup | None,
    deadline_s: float,
    *,
    device: torch.device | str | None = None,
    names: RankNames | None = None,
    has_sums: bool = False,
    coalesces: bool = False,
    one_stream: bool = False,
) -> TorchTransport:
    """Return a transport within a group, which exists, between tensors on `device`, or else on `default_device`.

    Raises: ConfigError, PeerLost, DeadlineExceeded, PipelineError.
    """
    # A rank that is not met alone leaves the group as it is: the others do not know of it, and may try again.
    return TorchTransport(
        group,
        deadline_s=deadline_s,
        device=default_device(group) if device is None else device,
        on_close=OF_PROCESS.enter(),
        names=names,
        has_sums=has_sums,
        coalesces=coalesces,
        one_stream=one_stream,
    )


def shares_process(transport: Transport) -> bool:
    """Whether other ranks are threads of this process, which may hold the very same modules."""
    return isinstance(transport, LocalTransport) and transport.num_ranks > 1


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the current accelerator where the group carries its tensors, as NCCL does those of GPUs; else the CPU."""
    device = current_device() if _is_distributed() else None
    if device is not None and carries(dist.get_backend_config(group), device.type):
        return device
    return torch.device("cpu")


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group as the default group counts them; none where there is no torch.distributed."""
    return dist.get_process_group_ranks(group) if _is_distributed() else []


def carries(backends: str, device_type: str) -> bool:
    """Whether backends, as in "cpu:gloo,cuda:nccl", hold the one that queues messages on a kind of accelerator.

    Asked of what torch calls a backend configuration: the name of the backend is "undefined" of a group that was made
    without one, and holds both where there are two.
    """
    return f"{device_type}:{queued_backend(device_type)}" in backends.lower().replace(" ", "").split(",")


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
