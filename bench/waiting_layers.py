"""A layer for each way in which a weight gradient waits for W, and two whose gradients are computed in I."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.execute.backend import aot_eager
from penstock.moving.dualpipe import WeightGradStore

WIDTH = 256
ROWS = 128
"""Of a microbatch: enough for the gradient of a matrix to be worth deferring."""


class Weighted(nn.Module):
    """Has a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH)


class Merged(nn.Module):
    """A matrix with a low-rank part that is added to it before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.ones(16, WIDTH)), nn.Parameter(torch.ones(WIDTH, 16))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.base.weight + self.up @ self.down / WIDTH)


class Bounded(Weighted):
    """Keeps its weights between -1 and 1, by two functions that each save their result."""

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, torch.tanh(torch.sigmoid(self.weight)))


class Scaling(Weighted):
    """Uses its matrix in no product."""

    def forward(self, features: Tensor) -> Tensor:
        return features * torch.tanh(torch.exp(self.weight))[0]


class Asking(torch.autograd.Function):
    """A product of twice the features; it keeps those as an attribute, where autograd does not look."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        ctx.doubled = features * 2
        ctx.save_for_backward(weight)
        return ctx.doubled @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of_features = 2 * gradient @ weight.t() if ps.wants_input_gradient(ctx) else None
        return of_features, ctx.doubled.t() @ gradient if ps.wants_weight_gradient(ctx) else None


class NeverAsking(torch.autograd.Function):
    """Computes both gradients whenever it is asked for one."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight)
        return features @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        features, weight = ctx.saved_tensors
        return gradient @ weight.t(), features.t() @ gradient


class Calling(Weighted):
    """Calls a custom function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: Tensor) -> Tensor:
        return torch.tanh(self.function.apply(features, self.weight))  # type: ignore[no-untyped-call]


class Later(torch.autograd.Function):
    """A product whose weight gradient is left to `layer.leave(gradient, features)`."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, layer: "Leaving") -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.layer = layer
        return F.linear(features, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        features, weight = ctx.saved_tensors
        ctx.layer.leave(gradient, features)
        return gradient @ weight, None, None


class Leaving(Weighted):
    """Computes its weight gradient later by itself."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.tanh(Later.apply(features, self.weight, self))  # type: ignore[no-untyped-call]

    def leave(self, gradient: Tensor, features: Tensor) -> None:
        """Keep what the weight gradient needs."""
        raise NotImplementedError

    def add(self, gradient: Tensor, features: Tensor) -> None:
        """Add the weight gradient."""
        found = gradient.t() @ features
        self.weight.grad = found if self.weight.grad is None else self.weight.grad + found


class Closing(Leaving):
    """Hands over a closure, as DualPipe's layers do."""

    def leave(self, gradient: Tensor, features: Tensor) -> None:
        WeightGradStore.put(lambda: self.add(gradient, features))


class Fused(Leaving):
    """Has a queue, as Transformer Engine's layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[tuple[Tensor, Tensor]] = deque()

    def leave(self, gradient: Tensor, features: Tensor) -> None:
        self.queue.append((gradient, features))

    def need_backward_dw(self) -> bool:
        return True

    def backward_dw(self) -> None:
        self.add(*self.queue.popleft())


class Building(Leaving):
    """Has a builder, as torch.distributed.pipelining takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[Tensor, Tensor]] = []

    def leave(self, gradient: Tensor, features: Tensor) -> None:
        self.left.append((gradient, features))

    def dw_builder(self) -> Callable[[], None]:
        left, self.left = self.left, []
        return lambda: [self.add(*each) for each in left][-1]


class Checkpointed(nn.Sequential):
    """Runs again in the backward."""

    def forward(self, features: Tensor) -> Tensor:
        return checkpoint(super().forward, features, use_reentrant=False)


class Casting(Weighted):
    """Computes in 16 bits, and runs again in the backward."""

    def forward(self, features: Tensor) -> Tensor:
        return checkpoint(self.run, features, use_reentrant=False)

    def run(self, features: Tensor) -> Tensor:
        return torch.tanh(F.linear(features.bfloat16(), self.weight.bfloat16()).float())


class Convolving(nn.Module):
    """A convolution over pictures of 16 x 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(features.view(-1, 1, 16, 16)))).view(features.shape)


class Feeding(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.down(F.gelu(self.up(self.norm(features))))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def normalized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def compiled() -> nn.Module:
    layer = Feeding()
    layer.compile(backend=aot_eager)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "product": linear,
    "products, norm, residual": Feeding,
    "convolutions": Convolving,
    "product, checkpointed": lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "product, checkpointed, in 16 bits": Casting,
    "weight branch: weight_norm": normalized,
    "weight branch: merged LoRA": Merged,
    "weight branch: two functions": Bounded,
    "weight branch, no product": Scaling,
    "custom function": partial(Calling, Asking),
    "compiled": compiled,
    "own: closure": Closing,
    "own: fused layer": Fused,
    "own: builder": Building,
    "small": lambda: nn.LayerNorm(WIDTH),
    "opaque": partial(Calling, NeverAsking),
}
"""By the way of waiting; each takes and returns [ROWS, WIDTH]."""
