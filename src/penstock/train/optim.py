"""The optimizer and its learning rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.execute.stages.gradient_norm import distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """What AdamW, the learning rate and the clipping need to know.

    Raises:
        ConfigError: a value out of its range.
    """

    learning_rate: float
    """Largest learning rate."""
    total_steps: int
    """Optimizer steps until the learning rate has reached its floor."""
    warmup_steps: int = 0
    """Optimizer steps until the largest learning rate; a shorter run ends before it is reached."""
    minimum_fraction: float = 0.1
    """Last learning rate, as a share of the largest."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    """Largest gradient norm over all ranks; 0: no clipping."""

    def __post_init__(self) -> None:
        # Weights are float32: a larger rate is a slip, and far larger ones overflow inside the optimizer.
        _check("learning_rate", self.learning_rate, 0 < self.learning_rate <= 1000, "larger than 0 and at most 1000")
        _check("total_steps", self.total_steps, self.total_steps >= 1, "1 or larger")
        _check("minimum_fraction", self.minimum_fraction, 0 <= self.minimum_fraction <= 1, "from 0 to 1")
        for key in ("beta1", "beta2"):
            _check(key, getattr(self, key), 0 <= getattr(self, key) < 1, "0 or larger and less than 1")
        for key in ("warmup_steps", "weight_decay", "epsilon", "clip_norm"):
            _check(key, getattr(self, key), getattr(self, key) >= 0, "0 or larger")


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerOptions
) -> torch.optim.AdamW:
    """Make the AdamW of one rank's parameters; a rank without any gets one that does nothing.

    Weight decay goes to parameters of two and more dimensions, embeddings included, and not to norms and biases. Only
    the shape decides, so the copies of a tied weight on several ranks are decayed alike and stay equal.
    """
    trained = distinct((name, parameter) for name, parameter in named_parameters if parameter.requires_grad)
    decayed = [(name, parameter) for name, parameter in trained if parameter.dim() >= 2]
    others = [(name, parameter) for name, parameter in trained if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or [{"params": []}],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
    )


def learning_rate_at(step: int, options: OptimizerOptions) -> float:
    """Return the learning rate of a step, counted from 1: linear to the largest at `warmup_steps`, then a cosine.

    The floor is reached at `total_steps` and held after it.

    Raises:
        PenstockError: a step below 1.
    """
    if step < 1:
        raise PenstockError(f"step {step} has no learning rate; steps are counted from 1")
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    if step >= options.total_steps:
        return options.learning_rate * options.minimum_fraction
    progress = (step - options.warmup_steps) / (options.total_steps - options.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return options.learning_rate * (options.minimum_fraction + (1 - options.minimum_fraction) * height)


def _check(key: str, value: float, is_in_range: bool, expected: str) -> None:
    if not (is_in_range and math.isfinite(value)):
        raise ConfigError(f"{value} is out of range; expected a finite number, {expected}", key=key)
