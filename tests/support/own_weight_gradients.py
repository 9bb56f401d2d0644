"""Linear layers that compute their weight gradients later by themselves, in each known form, and the plain one."""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

from penstock.moving.dualpipe import WeightGradStore
from tests.support.local_pipelines import WIDTH, settle


class Plain(nn.Module):
    """A linear layer without bias, and a curve."""

    def __init__(self, dtype=torch.float32, *, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width, dtype=dtype))

    def forward(self, features):
        return torch.tanh(F.linear(features, self.weight))


class _Later(torch.autograd.Function):
    """A linear layer whose weight gradient is left to `layer.keep(gradient, features)`."""

    @staticmethod
    def forward(ctx, features, weight, layer):
        ctx.save_for_backward(features, weight)
        ctx.layer = layer
        return F.linear(features, weight)

    @staticmethod
    def backward(ctx, gradient):
        features, weight = ctx.saved_tensors
        ctx.layer.keep(gradient, features)
        return gradient @ weight, None, None


class _LaterLayer(Plain):
    def forward(self, features):
        return torch.tanh(_Later.apply(features, self.weight, self))


def weight_gradient(gradient, features):
    """As autograd computes it."""
    return gradient.flatten(0, -2).t() @ features.flatten(0, -2)


class Fused(_LaterLayer):
    """Has a queue, as fused layers have; a call replaces the gradient, and calls no hooks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.queue = deque()
        self.is_delayed = True

    def keep(self, gradient, features):
        self.queue.append((gradient, features))

    def need_backward_dw(self):
        return self.is_delayed

    def backward_dw(self):
        self.weight.grad = weight_gradient(*self.queue.popleft())


class Adding(Fused):
    """Adds to the gradient, as other libraries do."""

    def backward_dw(self):
        gradient = weight_gradient(*self.queue.popleft())
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient


class Closing(_LaterLayer):
    """Hands over a closure, as in DualPipe's examples."""

    def keep(self, gradient, features):
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)

        def add():
            self.weight.grad += weight_gradient(gradient, features)

        if WeightGradStore.enabled:
            WeightGradStore.put(add)
        else:
            add()


class Building(_LaterLayer):
    """Collects in its backward what a builder takes, as torch's `dw_builder` does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = []

    def keep(self, gradient, features):
        self.kept.append((gradient, features))

    def dw_builder(self):
        kept, self.kept = self.kept, []

        def run():
            for each in kept:
                gradient = weight_gradient(*each)
                self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient

        return run


def layers_of(kind, num_layers, dtype=torch.float32):
    """Return layers of one kind, with the same values for every kind."""
    return [settle(kind(dtype), seed) for seed in range(num_layers)]
