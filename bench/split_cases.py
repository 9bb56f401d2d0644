"""The models of bench/split_backward.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.execute.backend import find_backend
from penstock.models.decoder import DecoderConfig, decoder_layers

NUM_TINY = 64
RANK = 8
"""Of the trained part of a matrix under LoRA."""


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, num_heads: int, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, positions, width]
        parts = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class Checkpointed(nn.Module):
    """Layers that are run again in the backward, and count it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.num_runs = layers, 0

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self._run, hidden, use_reentrant=False)

    def _run(self, hidden: Tensor) -> Tensor:
        self.num_runs += 1
        return self.layers(hidden)


class Tiny(nn.Module):
    """Two small layers beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


def conv_net(channels: int) -> nn.Module:
    """Four convolutions with batch norms."""
    layers = [
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        for _ in range(4)
    ]
    return nn.Sequential(*layers)


def decoder_blocks() -> nn.Module:
    """What a rank of the demo runs."""
    config = DecoderConfig(vocabulary=256, width=160, layers=2, heads=4, key_value_heads=2, hidden=432, length=128)
    return nn.Sequential(*(layer.build() for layer in decoder_layers(config)[1:3]))


class LowRank(nn.Module):
    """A frozen linear layer, and what is trained: two narrow matrices, whose product is added to its own (LoRA)."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(num_inputs, num_outputs).requires_grad_(False)
        self.up = nn.Parameter(torch.randn(num_outputs, RANK) / num_inputs)
        self.down = nn.Parameter(torch.randn(RANK, num_inputs) / RANK)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.frozen.weight + self.up @ self.down, self.frozen.bias)


class Custom(nn.Module):
    """A linear layer as a function of its own."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) / num_inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return Product.apply(hidden, self.weight, self.bias)


class Product(torch.autograd.Function):
    """What `nn.Linear` computes, each half of its backward where it is wanted."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0] and ps.wants_input_gradient(ctx):
            of_hidden = gradient @ weight
        if ctx.needs_input_grad[1] and ps.wants_weight_gradient(ctx):
            of_weight = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_hidden, of_weight, of_bias


def wide_block(linear: Callable[[int, int], nn.Module]) -> nn.Module:
    """A transformer block of width 512 with linear layers of some kind."""
    return Block(512, 8, linear)


WIDE = (4, 128, 512)


def compiled_block(backend: str) -> nn.Module:
    """The block of width 512, compiled."""
    block = wide_block(nn.Linear)
    block.compile(backend=find_backend(backend))
    return block


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer block": (lambda: Block(256, 4), (8, 128, 256)),
    "the same, checkpointed": (lambda: Checkpointed(Block(256, 4)), (8, 128, 256)),
    "two decoder blocks": (decoder_blocks, (2, 128, 160)),
    "block of width 512": (lambda: wide_block(nn.Linear), WIDE),
    "the same with LoRA": (lambda: wide_block(LowRank), WIDE),
    "with a custom function": (lambda: wide_block(Custom), WIDE),
    "compiled, aot_eager": (lambda: compiled_block("aot_eager"), WIDE),
    "compiled, inductor": (lambda: compiled_block("inductor"), WIDE),
    f"{NUM_TINY} tiny blocks": (lambda: nn.Sequential(*(Tiny(64) for _ in range(NUM_TINY))), (64, 64)),
    "conv net": (lambda: conv_net(32), (8, 32, 28, 28)),
}
"""Per name a model, and the shape of its input."""
