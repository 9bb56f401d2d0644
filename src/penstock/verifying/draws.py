"""Random draws of a model's forward: two orders of one generator cannot be compared, so dropout does not draw.

Functions of torch that drop out drop the same places of a shape in each call, so that a cut is compared with dropout at
work. Where a model still draws, numbers of its modules are set to 0: one called `p` in a class whose name says drop,
or one with "drop" in its own name, as of a `drop_path`.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.execute.accelerator import is_queued

PROBABILITY, DROP = "p", "drop"
DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
)
TRAIN_BY_REQUEST = frozenset({F.alpha_dropout, F.feature_alpha_dropout})
"""Functions whose `training` is False by default."""
ATTENTION, DROPOUT_PLACE, DROPOUT_NAME = F.scaled_dot_product_attention, 4, "dropout_p"


STEP = 0.618
"""Fraction of a turn between two elements; those in the first `p` of a turn are dropped."""


class _SameDropout(TorchFunctionMode):
    """In the thread that enters it, functions that drop out drop by place, and attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func in DROPOUTS:
            value = args[0] if args else keywords["input"]
            probability, is_in_place = _dropout_options(func, args[1:], keywords)
            factors = _factors(value, probability)
            return value.mul_(factors) if is_in_place else value * factors
        if func is ATTENTION and DROPOUT_NAME in keywords:
            keywords[DROPOUT_NAME] = 0.0
        if func is ATTENTION and len(args) > DROPOUT_PLACE:
            args = (*args[:DROPOUT_PLACE], 0.0, *args[DROPOUT_PLACE + 1 :])
        return func(*args, **keywords)


def _dropout_options(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[float, bool]:
    """Return with which probability a call drops, 0 in evaluation, and whether it does so in place."""
    names = ("p", "train") if func is torch.dropout else ("p", "training", "inplace")
    options = {"p": 0.5, "training": func not in TRAIN_BY_REQUEST, **dict(zip(names, args, strict=False)), **keywords}
    is_training = options.get("train", options["training"])
    return float(options["p"]) if is_training else 0.0, bool(options.get("inplace"))


def _factors(value: Tensor, probability: float) -> Tensor:
    """Return what the elements of a tensor are multiplied by: 0, or what keeps their mean."""
    turns = torch.arange(value.numel(), device=value.device).double().mul(STEP).frac().view(value.shape)
    return (turns >= probability).to(value.dtype) / (1 - probability or 1.0)


def functions_with_same_dropout(*, is_on: bool) -> AbstractContextManager[Any]:
    """Have the functions of torch that drop out do so by place in this thread, within the block, if `is_on`."""
    return _SameDropout() if is_on else nullcontext()


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
def without_dropout(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Have the dropout probabilities of modules at 0 within the block; they come back after it."""
    changed = set_to_zero(roots)
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
