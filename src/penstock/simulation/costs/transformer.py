"""FLOPs and bytes of a transformer: what one of its layers, its embedding and its head take for one microbatch.

With s tokens per sample, b samples, width h and a heads, a layer with feed-forward width 4h takes sbh times

    forward 24h + 4s        input gradient 24h + 8s        weight gradient 24h

FLOPs (arXiv 2401.10241, section 3), keeps sb (34h + 5as) bytes of 16-bit activations (arXiv 2205.05198, section 4), and
of these 32sbh until its weight gradient. The sums below say the same for other widths, fewer key and value heads, gated
feed-forward parts and other types.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError, shortened

DataType = Literal["bf16", "fp16", "tf32", "fp32"]

BYTES_OF_TYPE: dict[str, int] = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
OPTIMIZER_BYTES_OF_TYPE: dict[str, int] = {"bf16": 12, "fp16": 12, "tf32": 8, "fp32": 8}
"""Per parameter: Adam's two moments and, beside 16-bit parameters, a 32-bit copy (arXiv 1910.02054, section 3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder or encoder of equal layers, and the microbatch that goes through it."""

    num_layers: int
    hidden: int
    """Features per token between the layers."""
    num_heads: int
    vocabulary: int
    sequence: int
    """Tokens per sample."""
    microbatch: int = 1
    """Samples per microbatch."""
    num_key_value_heads: int | None = None
    """Fewer than heads for grouped or multi-query attention; as many unless given."""
    feed_forward: int | None = None
    """Features inside the feed-forward part; 4 x hidden unless given."""
    is_gated: bool = False
    """The feed-forward part has a third matrix (SwiGLU)."""
    is_causal: bool = False
    """Count only the half of the attention that a causal mask leaves."""
    keeps_attention_scores: bool = True
    """False where attention recomputes its scores in the backward, as FlashAttention does."""
    has_dropout: bool = True
    data_type: DataType = "bf16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "vocabulary", "sequence", "microbatch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)}; give 1 or more", key=name)
        if self.hidden % self.num_heads:
            raise ConfigError(f"{self.num_heads} does not divide the width of {self.hidden}", key="num_heads")
        heads = self.num_key_value_heads
        if heads is not None and (heads < 1 or self.num_heads % heads):
            raise ConfigError(f"{heads} does not divide the {self.num_heads} heads", key="num_key_value_heads")
        if self.data_type not in BYTES_OF_TYPE:
            types = ", ".join(BYTES_OF_TYPE)
            raise ConfigError(f"there is no type {shortened(self.data_type)}; known: {types}", key="data_type")

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.sequence * self.microbatch

    @property
    def key_value_width(self) -> int:
        """Features of the keys, and of the values, of one token."""
        heads = self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads
        return self.hidden // self.num_heads * heads

    @property
    def feed_forward_width(self) -> int:
        return 4 * self.hidden if self.feed_forward is None else self.feed_forward

    @property
    def bytes_each(self) -> int:
        """Bytes of one number."""
        return BYTES_OF_TYPE[self.data_type]

    @property
    def message_bytes(self) -> int:
        """Bytes of what one layer passes to the next."""
        return self.bytes_each * self.tokens * self.hidden


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """FLOPs and bytes of one part of the model for one microbatch."""

    forward_flops: float
    backward_input_flops: float
    backward_weight_flops: float
    num_parameters: int
    activation_bytes: int
    weight_context_bytes: int


def layer_of(model: Transformer) -> LayerGroup:
    """Return what one layer takes."""
    width, inner, tokens = model.hidden, model.feed_forward_width, model.tokens
    projected = width + 2 * model.key_value_width
    num_up = 2 if model.is_gated else 1
    weights = width * projected + width * width + (num_up + 1) * width * inner
    attention = 4.0 * tokens * model.sequence * width / (2 if model.is_causal else 1)
    linear = 2.0 * tokens * weights
    # Inputs of the four products and of both norms, queries, keys and values, and what the activation function needs.
    features_kept = 5 * width + projected + (num_up + 1) * inner
    mask_bytes = 2 * tokens * width if model.has_dropout else 0
    inputs, gradients = 3 * width + inner, projected + 2 * width + num_up * inner
    return LayerGroup(
        forward_flops=linear + attention,
        backward_input_flops=linear + 2 * attention,
        backward_weight_flops=linear,
        num_parameters=weights + 2 * width,
        activation_bytes=model.bytes_each * tokens * features_kept + mask_bytes + _score_bytes(model),
        weight_context_bytes=model.bytes_each * tokens * (inputs + gradients),
    )


def embedding_of(model: Transformer) -> LayerGroup:
    """Return what looking up the tokens takes: no products, only parameters and the mask of a dropout."""
    mask_bytes = model.tokens * model.hidden if model.has_dropout else 0
    return LayerGroup(0.0, 0.0, 0.0, model.vocabulary * model.hidden, mask_bytes, 0)


def head_of(model: Transformer) -> LayerGroup:
    """Return what the last norm, the scores of the vocabulary (in 32 bits) and the loss take."""
    width, tokens = model.hidden, model.tokens
    linear = 2.0 * tokens * width * model.vocabulary
    return LayerGroup(
        linear,
        linear,
        linear,
        model.vocabulary * width + width,
        tokens * (2 * model.bytes_each * width + 4 * model.vocabulary),
        tokens * model.bytes_each * (width + model.vocabulary),
    )


def _score_bytes(model: Transformer) -> int:
    """The scores of all pairs of tokens: before and after a dropout, and its mask."""
    if not model.keeps_attention_scores:
        return 0
    pairs = model.num_heads * model.sequence * model.tokens
    return pairs * (2 * model.bytes_each + 1 if model.has_dropout else model.bytes_each)
