"""A Llama-style decoder language model as a list of layers: `embedding`, `blocks.0`, ..., `norm`, `head`.

Norm and head are layers of their own, so that the names of all parameters stay the same whatever the split. Blocks are
pre-norm: RMSNorm, grouped-query attention with rotary embedding, RMSNorm, SwiGLU.

Shapes: seq is tokens per sequence; queries have `heads` heads, keys and values `key_value_heads`.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.carry import Carry
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layer import LayerSpec

IGNORED_TARGET = -100
INITIAL_DEVIATION = 0.02
ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-5


def decoder_layers(config: DecoderConfig, *, seed: int = 0, takes_positions: bool = False) -> list[LayerSpec]:
    """Describe the decoder's layers; tokens [batch, seq] go in, logits [batch, seq, vocabulary] come out.

    `seed` decides the initial parameters. Weights are the operations of a forward per token, relative to one block.
    With `takes_positions`, blocks take the keyword `positions` of sequences that hold several documents.

    Raises:
        ConfigError: heads that do not divide what they must.
    """
    config.require_no_problem()
    block = _block_operations(config)

    def layer(name: str, build: Callable[[], nn.Module], operations: float) -> LayerSpec:
        tied = (("weight", "embedding.weight"),) if name == "head" and config.tied_head else ()
        return LayerSpec(name, build, seed, operations / block, tied)

    kind = PackedBlock if takes_positions else Block
    blocks = [layer(f"blocks.{index}", partial(kind, config), block) for index in range(config.layers)]
    return [
        layer("embedding", partial(Embedding, config), 0.0),  # a look-up
        *blocks,
        layer("norm", partial(_build_norm, config), 4.0 * config.width),
        layer(
            "head", partial(_linear, config, config.width, config.vocabulary), 2.0 * config.width * config.vocabulary
        ),
    ]


def cross_entropy_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all tokens whose target is not -100, in nats, in float32 or better; 0 where none is left.

    `logits` is [..., vocabulary], `target` [...] of int64.

    Raises:
        PenstockError: the shapes do not fit.
    """
    if logits.shape[:-1] != target.shape:
        raise PenstockError(
            f"logits of shape {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"but it has {tuple(target.shape)}"
        )
    scores = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))  # [tokens, vocabulary]
    total = F.cross_entropy(scores, target.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total / (target != IGNORED_TARGET).sum().clamp(min=1)


def count_target_tokens(target: Tensor) -> int:
    """Return how many tokens `cross_entropy_loss` is the mean of: its `count` for token-weighted microbatches."""
    return int((target != IGNORED_TARGET).sum())


class Embedding(nn.Embedding):
    """Token ids [batch, seq] of int64 to features [batch, seq, width]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.vocabulary, config.width, dtype=config.torch_dtype)
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)
        self.max_length = config.length

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, seq]
        if tokens.shape[-1] > self.max_length:
            raise _too_long(tokens.shape[-1], self.max_length)
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    """One decoder block, [batch, seq, width] to the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = _build_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _build_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, features: Tensor) -> Tensor:  # [batch, seq, width]
        return self._result(features, None)

    def _result(self, features: Tensor, positions: Tensor | None) -> Tensor:
        attended: Tensor = features + self.attention(self.attention_norm(features), positions)
        result: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return result


class PackedBlock(Block):
    """A block for sequences that hold several documents, none of which reads another.

    `positions` [batch, seq] of int64 counts from 0 at the begin of each document; None: the sequence is one document.
    The ranks agree on a keyword of any layer in every step, so plain blocks take none.
    """

    def forward(self, features: Tensor, positions: Tensor | None = None) -> Tensor:  # [batch, seq, width]
        return self._result(features, positions)


class Attention(nn.Module):
    """Causal grouped-query attention: query head h reads key-value head h // (heads / key_value_heads).

    Of a sequence that comes in slices, each slice also reads the keys and values of those before it.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.shares_keys = config.key_value_heads < config.heads
        key_value_width = config.key_value_heads * config.head_width
        self.query = _linear(config, config.width, config.width)
        self.key = _linear(config, config.width, key_value_width)
        self.value = _linear(config, config.width, key_value_width)
        self.output = _linear(config, config.width, config.width, deviation=_residual_deviation(config))
        cosine, sine = _rotary_tables(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.carry = Carry()

    def forward(self, features: Tensor, positions: Tensor | None = None) -> Tensor:  # [batch, seq, width]
        earlier_keys_values = self.carry.get()
        start = 0 if earlier_keys_values is None else earlier_keys_values[0].shape[2]
        angles = self._angles(start, features.shape[1], positions)
        query = _rotate(self._heads(self.query(features)), *angles)
        key = _rotate(self._heads(self.key(features)), *angles)
        value = self._heads(self.value(features))
        if earlier_keys_values is not None:
            key, value = (
                torch.cat([earlier_keys_values[0], key], dim=2),
                torch.cat([earlier_keys_values[1], value], dim=2),
            )
        self.carry.put((key, value))
        mask = None
        if positions is not None:
            mask = _document_mask(positions, start)
        elif earlier_keys_values is not None:
            mask = _causal_mask(features.shape[1], start, features.device)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.shares_keys
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, features: Tensor) -> Tensor:  # [batch, seq, heads * head_width] -> [batch, heads, seq, head_width]
        return features.reshape(*features.shape[:2], -1, self.head_width).transpose(1, 2)

    def _angles(self, start: int, length: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines by position, [seq, head_width / 2] or [batch, 1, seq, head_width / 2].

        Raises:
            PenstockError: the positions go beyond those that the model is for.
        """
        end = start + length
        if end > len(self.cosine):
            raise _too_long(end, len(self.cosine))
        if positions is None:
            return self.cosine[start:end], self.sine[start:end]
        return self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) over [batch, seq, width]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = _linear(config, config.width, config.hidden)
        self.up = _linear(config, config.width, config.hidden)
        self.down = _linear(config, config.hidden, config.width, deviation=_residual_deviation(config))

    def forward(self, features: Tensor) -> Tensor:  # [batch, seq, width]
        result: Tensor = self.down(F.silu(self.gate(features)) * self.up(features))
        return result


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pair (feature i, feature i + head_width / 2) by an angle that grows with the position."""
    first, second = heads.tensor_split(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(heads.dtype)


def _document_mask(positions: Tensor, start: int) -> Tensor:  # [batch, 1, seq, start + seq]
    """Say which tokens each of the last may read: of its own document, itself and those before it."""
    positions_in_sequence = torch.arange(start + positions.shape[1], device=positions.device)
    last_positions = positions_in_sequence[start:]
    document_starts = (last_positions - positions).unsqueeze(-1)  # where the document of each token begins
    is_earlier = positions_in_sequence <= last_positions.unsqueeze(-1)
    return ((positions_in_sequence >= document_starts) & is_earlier).unsqueeze(1)


def _causal_mask(length: int, start: int, device: torch.device) -> Tensor:  # [length, start + length]
    """Say which of all positions each of the last `length` may read: itself and those before it."""
    return torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)


def _too_long(length: int, max_length: int) -> PenstockError:
    return PenstockError(
        f"the sequences have {length} tokens, but the model is for at most {max_length}; shorten them or build the "
        "model for longer ones"
    )


def _build_norm(config: DecoderConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.width, eps=NORM_EPSILON, dtype=config.torch_dtype)


def _linear(config: DecoderConfig, num_in: int, num_out: int, *, deviation: float = INITIAL_DEVIATION) -> nn.Linear:
    linear = nn.Linear(num_in, num_out, bias=False, dtype=config.torch_dtype)
    nn.init.normal_(linear.weight, std=deviation)
    return linear


def _residual_deviation(config: DecoderConfig) -> float:
    # each block adds to the residual stream twice; so the sum of all has the spread of one
    return INITIAL_DEVIATION / math.sqrt(2 * config.layers)


def _rotary_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_width / 2], in float32 at least: bfloat16 cannot count positions."""
    half = config.head_width // 2
    frequencies = torch.pow(ROTARY_BASE, -torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(config.length, dtype=torch.float64), frequencies)
    dtype = torch.promote_types(config.torch_dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _block_operations(config: DecoderConfig) -> float:
    """Count multiplications and additions of a block's forward per token, at sequences of full length."""
    key_value_width = config.key_value_heads * config.head_width
    products = config.width * (2 * config.width + 2 * key_value_width + 3 * config.hidden)
    causal_attention = config.length * config.width  # scores and mixing, over half the positions on average
    return 2.0 * (products + causal_attention)
