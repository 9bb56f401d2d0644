"""Layers that take a given time and compute nothing: to try schedules, wires and predictions without a model."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EmulatedLayer(nn.Module):
    """Sleeps in forward and backward, and returns its input; its one weight, a factor of 1, makes it trainable.

    `weight_s` is how much of `backward_s` the gradient of the weight takes. In a split backward W sleeps for it, and I
    for the rest, whether or not the input needs a gradient.
    """

    def __init__(self, forward_s: float, backward_s: float, *, weight_s: float = 0.0) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.weight_s = weight_s
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, features: Tensor) -> Tensor:
        weight = _sleep(self.weight, 0.0, self.weight_s) if self.weight_s else self.weight
        product = F.linear(features.reshape(-1, 1), weight).view_as(features)
        return _sleep(product, self.forward_s, self.backward_s - self.weight_s)


def _sleep(inputs: Tensor, forward_s: float, backward_s: float) -> Tensor:
    result: Tensor = _Sleep.apply(inputs, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        if forward_s:
            time.sleep(forward_s)
        return inputs.clone()  # no view: torch's own split of a backward refuses those as outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None
