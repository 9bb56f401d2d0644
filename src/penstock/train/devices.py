"""Where the ranks of a run compute: on a GPU each, or on CPUs; whether the machine can do it, and the memory it takes.

A GPU is any accelerator that this torch is built for. Too few are an error that names the choices, never a silent run
on CPUs.
"""

import resource
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, count_of
from penstock.execute.accelerator import (
    accelerator_type,
    allocator_bytes,
    has_bfloat16,
    num_accelerators,
    queued_backend,
)
from penstock.execute.transport.world import default_device
from penstock.train.settings.config import RunConfig

KEY = "run.device"
AUTO, CPU = "auto", "cpu"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of the unit in which getrusage counts memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as this process sees it."""

    kind: str | None
    """The kind of accelerator that this torch is built for; None where it computes on CPUs alone."""
    num_gpus: int
    has_backend: bool
    """Whether its GPUs can exchange messages."""


def look() -> Machine:
    """Look at this machine, without starting an accelerator."""
    kind = accelerator_type()
    backend = None if kind is None or not dist.is_available() else queued_backend(kind)
    has_backend = backend is not None and dist.is_backend_available(backend)
    return Machine(kind, num_accelerators(), has_backend)


def choose_device(setting: str, num_local_ranks: int, machine: Machine) -> str:
    """Return the type of device for the ranks of one machine, such as `cuda` or `cpu`; `setting` is `run.device`.

    `auto` takes the machine's GPUs if there are any. Each of the `num_local_ranks` needs a GPU of its own.

    Raises:
        ConfigError: torch is not built for the device, there are fewer GPUs than ranks, or no backend such as NCCL.
    """
    if setting == CPU or (setting == AUTO and not machine.num_gpus):
        return CPU
    kind = machine.kind
    if kind is None or setting not in (AUTO, kind):
        ability = "computes on CPUs alone" if kind is None else f"is built for {kind!r}"
        choices = " or ".join(repr(name) for name in (AUTO, CPU, kind) if name is not None)
        raise ConfigError(f"this torch {ability}, and has no device {setting!r}; expected {choices}", key=KEY)
    if machine.num_gpus < num_local_ranks:
        ranks = count_of(num_local_ranks, "rank")
        gpus = count_of(machine.num_gpus, "GPU") if machine.num_gpus else "no GPU"
        fewer = f"pipeline.ranks={machine.num_gpus}, one a GPU, of all replicas; " if machine.num_gpus else ""
        raise ConfigError(
            f"{ranks} on a machine with {gpus} that torch sees. Choose: {fewer}run.device='cpu' to train on CPUs; or a "
            "machine with more GPUs (a variable such as CUDA_VISIBLE_DEVICES may hide some)",
            key=KEY,
        )
    if num_local_ranks > 1 and not machine.has_backend:
        raise ConfigError(
            f"this torch has no backend such as NCCL, by which {num_local_ranks} GPUs exchange messages. Choose: "
            "pipeline.ranks=1; run.device='cpu' to train on CPUs; or a torch with such a backend",
            key=KEY,
        )
    return kind


def device_of_rank(config: RunConfig) -> torch.device:
    """Return where this rank computes: its group was made for it, and a rank that is alone looks for itself.

    Raises:
        ConfigError: there is no such device, or it does not compute in `precision.compute`.
    """
    device = default_device(None)
    kind = choose_device(config.run.device, 1, look()) if config.num_processes == 1 else CPU
    if kind != CPU:
        device = torch.device(kind, 0)
    if config.precision.compute == "bfloat16" and not has_bfloat16(device):
        raise ConfigError(
            "this GPU does not compute in bfloat16; use 'float16', or 'model' for float32", key="precision.compute"
        )
    return device


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes so far: of tensors on an accelerator, else those that the process had in memory."""
    most = allocator_bytes(device, peak=True)
    if most is not None:
        return most.allocated
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
