"""The optimizer and its learning rate."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.execute.stages.gradient_norm import distinct
from penstock.train.sections import OptimizerSection


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerSection
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


def learning_rate_at(step: int, options: OptimizerSection, num_steps: int) -> float:
    """Return the learning rate of a step, counted from 1: linear to the largest at `warmup_steps`, then a cosine.

    The floor is reached at `num_steps` and held after it.

    Raises:
        PenstockError: a step below 1.
    """
    if step < 1:
        raise PenstockError(f"step {step} has no learning rate; steps are counted from 1")
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    if step >= num_steps:
        return options.learning_rate * options.minimum_fraction
    progress = (step - options.warmup_steps) / (num_steps - options.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return options.learning_rate * (options.minimum_fraction + (1 - options.minimum_fraction) * height)
