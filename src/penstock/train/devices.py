"""Where the ranks of a run compute: on a GPU each, or on CPUs; and whether the machine can do it.

Too few GPUs are an error that names the choices, never a silent run on CPUs.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, count_of
from penstock.execute.transport.world import default_device
from penstock.train.settings.config import RunConfig

KEY = "run.device"
CPU_BACKEND = "gloo"
CUDA_BACKEND = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process sees of its machine."""

    num_gpus: int
    has_nccl: bool


def look() -> Machine:
    """Look at this machine, without starting CUDA."""
    return Machine(torch.cuda.device_count(), dist.is_available() and dist.is_nccl_available())


def choose_device(wanted: str, num_local_ranks: int, machine: Machine) -> str:
    """Return "cuda" or "cpu" for the ranks of one machine; `wanted` is that of `run.device`.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or no NCCL between them.
    """
    if wanted == "cpu" or (wanted == "auto" and not machine.num_gpus):
        return "cpu"
    if machine.num_gpus < num_local_ranks:
        ranks, gpus = (
            count_of(num_local_ranks, "rank"),
            count_of(machine.num_gpus, "GPU") if machine.num_gpus else "no GPU",
        )
        fewer = f"pipeline.ranks={machine.num_gpus}, one a GPU; " if machine.num_gpus else ""
        raise ConfigError(
            f"{ranks} on a machine with {gpus} that torch sees. Choose: {fewer}run.device='cpu' to train on CPUs; or a "
            "machine with more GPUs (CUDA_VISIBLE_DEVICES may hide some)",
            key=KEY,
        )
    if num_local_ranks > 1 and not machine.has_nccl:
        raise ConfigError(
            f"this torch has no NCCL, by which {num_local_ranks} GPUs exchange messages. Choose: pipeline.ranks=1; "
            "run.device='cpu' to train on CPUs; or a torch with CUDA",
            key=KEY,
        )
    return "cuda"


def describe_devices(device: torch.device, num_ranks: int, precision: str) -> str:
    """Return the line that says where and how a run computes."""
    if device.type == "cuda":
        where, between = torch.cuda.get_device_name(device), "NCCL"
    else:
        where, between = "CPU", "gloo"
    each = f"1 rank on {where}" if num_ranks == 1 else f"{num_ranks} ranks on {where}, backend {between}"
    return f"{each}; precision {precision}"


def device_of_rank(config: RunConfig) -> torch.device:
    """Return where this rank computes: its group was made for it, and a rank that is alone looks for itself.

    Raises:
        ConfigError: there is no such device, or it does not compute in `precision.compute`.
    """
    device = default_device(None)
    if config.pipeline.ranks == 1 and choose_device(config.run.device, 1, look()) == "cuda":
        device = torch.device("cuda", 0)
    if config.precision.compute == "bfloat16" and not has_bfloat16(device):
        raise ConfigError(
            "this GPU does not compute in bfloat16; use 'float16', or 'model' for float32", key="precision.compute"
        )
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 itself."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
