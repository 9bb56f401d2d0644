"""The microbatch that layers are counted with: real tokens, since models look at the values of tokens and masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.execute.batch.needs import batch_binding
from penstock.execute.stages.signatures import taken_keywords
from penstock.microbatch_place import MICROBATCH_PLACE, MicrobatchPlace

_DECODER_TOKENS = "decoder_input_ids"
_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """One microbatch as the layers take it."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    tokens: Tensor  # [microbatch, sequence]

    @classmethod
    def of(cls, layers: Sequence[Any], microbatch: int, sequence_length: int) -> "TokenBatch":
        """Return a microbatch for a model.

        Raises:
            ConfigError: a size that is none, or a sequence beyond the model's positions.
        """
        for key, size in (("microbatch", microbatch), ("sequence_length", sequence_length)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{size!r}; expected a whole number, 1 or larger", key=key)
        config = _text_config(layers)
        most = getattr(config, _POSITIONS, None)
        if isinstance(most, int) and 0 < most < sequence_length:
            raise ConfigError(
                f"{sequence_length} tokens, but the model knows {most} positions ({_POSITIONS} of its config); "
                "expected a sequence of at most so many, or a config with more",
                key="sequence_length",
            )
        try:
            tokens = torch.zeros(microbatch, sequence_length, dtype=torch.int64)
        except (RuntimeError, TypeError) as error:  # torch's words for memory, and for numbers beyond 64 bits
            problem = f"{microbatch} x {sequence_length} tokens do not fit into this machine's memory"
            raise ConfigError(
                f"{problem}; expected a shorter sequence or fewer of them", key="sequence_length"
            ) from error
        binding = batch_binding(layers)
        if binding is None:
            return cls((tokens,), {}, tokens)
        keywords = {}
        if _DECODER_TOKENS in binding.parameters and getattr(config, "is_encoder_decoder", False):
            keywords[_DECODER_TOKENS] = tokens.clone()
        args, bound_keywords = binding.bind((tokens,), keywords)
        return cls(args, bound_keywords, tokens)

    def keywords_for(self, layer: nn.Module) -> dict[str, Any]:
        """Return the keywords that a layer takes."""
        keywords = {**self.keywords, MICROBATCH_PLACE: MicrobatchPlace(0, 1, 0, 1.0)}
        return taken_keywords(layer).select(keywords, len(self.args))

    def target_of(self, output: Any) -> Tensor:
        """Return labels for the outputs of a model: one for each position, or one for each row."""
        has_positions = not isinstance(output, Tensor) or output.shape[: self.tokens.dim()] == self.tokens.shape
        return self.tokens if has_positions else self.tokens[:, 0]


def require_tokens(first_layer: nn.Module, name: str) -> None:
    """Refuse a model whose first layer looks up no tokens. Raises: ConfigError."""
    if not any(isinstance(module, nn.Embedding) for module in first_layer.modules()):
        raise ConfigError(
            f"the first layer, {name!r}, has no table of tokens (nn.Embedding); sizes are counted with tokens, so give "
            "all layers of a model of tokens, the embedding first",
            key="layers",
        )


def _text_config(layers: Any) -> Any:
    """Return the part of a model's config that is about text; None for layers without a config."""
    config = getattr(layers, "config", None)
    text_config = getattr(config, "get_text_config", None)
    return config if text_config is None else text_config()
