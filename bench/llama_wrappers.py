"""Layers of a Llama of transformers, wrapped by hand as one would without `ps.from_transformers`; for models.py."""

from typing import Any

import torch
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens [batch, seq] to features [batch, seq, hidden], with cos and sin of their positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return hidden, *self.rotary_emb(hidden, positions)


class Decoder(nn.Module):
    """One decoder layer, which hands cos and sin on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, cos, sin = state
        return self.layer(hidden, position_embeddings=(cos, sin)), cos, sin


class Head(nn.Module):
    """Norm and head."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(state[0]))
        return logits


def wrapped(llama: Any) -> list[nn.Module]:
    """Return the layers of a LlamaForCausalLM that computes attention by sdpa, which is causal without a mask."""
    layers = [Decoder(layer) for layer in llama.model.layers]
    return [Embed(llama.model), *layers, Head(llama.model.norm, llama.lm_head)]
