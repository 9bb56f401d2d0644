"""Layers that take a given time and compute nothing: to try schedules, wires and predictions without a model."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class EmulatedLayer(nn.Module):
    """Sleeps in forward and backward, and hands its input on; its one weight makes it trainable."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(features, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return features + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], gradients[0].sum(), None, None
