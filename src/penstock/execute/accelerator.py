"""Asks a device whether it queues its work, and for its events, its memory, its random numbers and its name.

    CPU            has run what it was given when a call returns
    accelerator    queues it: the host goes on, and events say how far the device has come

All of it is torch's interface to any accelerator, so no other file asks for one kind. A process has one kind at most.
A feature that a kind lacks is noted once in the log, and left out.
"""

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import ConfigError

LOG = logging.getLogger("penstock")
_NOT_QUEUED = ("cpu", "meta")


def is_queued(device: torch.device) -> bool:
    """Whether work on a device is queued, and runs later than the call that asks for it."""
    return device.type not in _NOT_QUEUED


def accelerator_type() -> str | None:
    """Return the kind of accelerator that this torch is built for, such as "cuda"; without starting it."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def num_accelerators() -> int:
    """Count the accelerators that this process may use, without starting them."""
    return torch.accelerator.device_count()


def current_device() -> torch.device | None:
    """Return the accelerator that this thread uses; None where there is none."""
    kind = accelerator_type()
    if kind is None or not num_accelerators():
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def require_available(device: torch.device, key: str) -> torch.device:
    """Return a device that this process can compute on.

    Raises:
        ConfigError: this torch is built without it, or this machine has none, or not so many.
    """
    if not is_queued(device):
        return device
    kind, count = accelerator_type(), num_accelerators()
    index = 0 if device.index is None else device.index
    if device.type == kind and index < count:
        return device
    if device.type != kind:
        obstacle = f"this torch {'computes on CPUs alone' if kind is None else f'is built for {kind!r}'}"
    else:
        obstacle = f"this process sees {count} of this kind" if count else "this process sees none of this kind"
    choices = ["'cpu'"] + ([f"'{kind}:{place}'" for place in range(count)] if kind else [])
    raise ConfigError(f"there is no device {str(device)!r}: {obstacle}. Choose {' or '.join(choices)}", key=key)


# ---- events and streams


def make_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Return an event that can be recorded behind a device's queued work; with `timing`, it also tells the time.

    Raises:
        RuntimeError: the device has no such events.
    """
    return torch.Event(device, enable_timing=timing)


def has_events(device: torch.device) -> bool:
    """Whether events tell how far a device has come."""
    try:
        event = make_event(device)
        event.record()
        event.query()
    except RuntimeError:
        return False
    return True


def make_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream beside the current one; None where a device has none, or no events by which streams wait."""
    try:
        stream = torch.Stream(device)
        make_event(device).record(stream)
    except RuntimeError as error:
        _say_once(device.type, "streams beside the current one", str(error))
        return None
    return stream


def synchronize(device: torch.device) -> None:
    """Let the host wait until a device has run all that it was given."""
    if is_queued(device):
        torch.accelerator.synchronize(device)


# ---- memory


class AllocatorBytes(NamedTuple):
    """Bytes that the allocator of a device has given out, and bytes that it has taken from the device for that."""

    allocated: int
    reserved: int


def allocator_bytes(device: torch.device, *, peak: bool = False) -> AllocatorBytes | None:
    """Return a device's bytes, now or the most since `reset_peak`; None of the CPU and of devices that do not count."""
    if not is_queued(device):
        return None
    accelerator = torch.accelerator
    try:
        if peak:
            return AllocatorBytes(accelerator.max_memory_allocated(device), accelerator.max_memory_reserved(device))
        return AllocatorBytes(accelerator.memory_allocated(device), accelerator.memory_reserved(device))
    except RuntimeError as error:
        _say_once(device.type, "bytes of its allocator", str(error))
        return None


def reset_peak(device: torch.device) -> None:
    """Begin anew to count the most bytes of a device."""
    if allocator_bytes(device) is not None:
        torch.accelerator.reset_peak_memory_stats(device)


# ---- random numbers


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that layers on an accelerator draw from; None where torch does not show it."""
    torch.empty(0, device=device)  # the accelerator begins here at the latest, and with it there are generators
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    if generators is None:
        _say_once(device.type, "generators of random numbers", "seeds and checkpoints leave them out")
        return None
    generator: torch.Generator = generators[index]
    return generator


# ---- facts of a device


def name_of(device: torch.device) -> str:
    """Return the name of a device's model, or its kind where it has none."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if callable(name) else device.type


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 itself; one that does not say so is taken to."""
    has = getattr(torch.get_device_module(device), "is_bf16_supported", None) if is_queued(device) else None
    return not callable(has) or bool(has(including_emulation=False))


def memory_snapshot(device: torch.device) -> Any:
    """Return what the allocator's history has, to be written as JSON; None where a device keeps none."""
    snapshot = getattr(torch.get_device_module(device), "memory_snapshot", None) if is_queued(device) else None
    return snapshot() if callable(snapshot) else None


def queued_backend(device_type: str) -> str | None:
    """Return the backend of torch.distributed whose messages are queued on an accelerator, such as NCCL.

    None where there is none: gloo carries messages between hosts.
    """
    try:
        name: str = dist.get_default_backend_for_device(device_type)
    except ValueError:
        return None
    return None if name == dist.Backend.GLOO else name


@cache
def _say_once(kind: str, feature: str, reason: str) -> None:
    LOG.warning("devices of kind %r have no %s: %s", kind, feature, reason)
