"""Layers that sleep in place of work, by where their weight work stands: what bench/devices.py trains."""

import time
from collections.abc import Callable
from typing import Any

import torch
from emulated_layer import EmulatedLayer
from torch import Tensor, nn

import penstock as ps


class Branch(nn.Module):
    """Its weight work is a function of the weight alone, and meets the activations in an addition."""

    def __init__(self, part_s: float) -> None:
        super().__init__()
        self.part_s, self.weight = part_s, nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        return Sleep.apply(features + Sleep.apply(self.weight, 0.0, self.part_s), self.part_s, self.part_s)


class Sleep(torch.autograd.Function):
    """Sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Both(nn.Module):
    """One function computes the gradients of activations and weight; its inputs always need one."""

    def __init__(self, part_s: float) -> None:
        super().__init__()
        self.part_s = part_s
        self.shift, self.weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        return SleepForBoth.apply(features + self.shift, self.weight, self.part_s)


class SleepForBoth(torch.autograd.Function):
    """A product that sleeps once for each half of its backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, part_s: float) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.part_s = part_s
        time.sleep(part_s)
        return features * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        features, weight = ctx.saved_tensors
        of_features = of_weight = None
        if ps.wants_input_gradient(ctx):
            time.sleep(ctx.part_s)
            of_features = gradient * weight
        if ps.wants_weight_gradient(ctx):
            time.sleep(ctx.part_s)
            of_weight = (gradient * features).sum().reshape(1)
        return of_features, of_weight, None


def product(part_s: float) -> nn.Module:
    """Its weight work is a function of the weight, behind a product with the activations."""
    return EmulatedLayer(part_s, 2 * part_s, weight_s=part_s)


WORK: dict[str, Callable[[float], nn.Module]] = {"product": product, "branch": Branch, "function": Both}
"""Layers whose F, I and W take so many seconds each."""
