"""Random draws of a model's forward: two orders of one generator cannot be compared, so dropout is set to 0.

A number is one of dropout if it is called `p` in a module whose class says dropout or drop, or if its own name has
"drop" in it, as `attention_dropout` and `drop_path` have.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.execute.accelerator import is_queued

PROBABILITY, DROP = "p", "drop"


def probabilities(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield each dropout probability above 0, with its module and attribute."""
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        is_dropout = DROP in type(module).__name__.lower()
        for name, value in vars(module).items():
            is_named = DROP in name.lower() or (is_dropout and name == PROBABILITY)
            if is_named and isinstance(value, float) and value > 0:
                yield module, name, value


def set_to_zero(roots: Iterable[nn.Module]) -> list[tuple[nn.Module, str, float]]:
    """Set each dropout probability to 0; return what it was."""
    changed = list(probabilities(roots))
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    return changed


@contextmanager
def without_dropout(roots: Iterable[nn.Module], *, is_on: bool) -> Iterator[None]:
    """Have dropout off within the block, if `is_on`; the probabilities come back after it."""
    changed = set_to_zero(roots) if is_on else []
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch and of Python as they were before the block."""
    state = random.getstate()
    devices = [device] if is_queued(device) else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(state)


def seed_generators(seed: int, device: torch.device) -> None:
    """Let the generators of torch, on the CPU and a device, and of Python begin at a seed."""
    torch.default_generator.manual_seed(seed)
    if is_queued(device):
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Whether anything was drawn since `seed_generators` with the same arguments; the generators stand there then."""
    state = _state(device)
    seed_generators(seed, device)
    return state != _state(device)


def _state(device: torch.device) -> object:
    states = [torch.default_generator.get_state()]
    if is_queued(device):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return [state.tolist() for state in states], random.getstate()
