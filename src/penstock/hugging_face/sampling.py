"""How a token is taken from the logits behind a text, bit for bit as `generate` of transformers takes it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The odds of the tokens, by which one is drawn.

    Raises:
        ConfigError: a number is not one that it may be.
    """

    temperature: float = 0.0
    """Divides the logits; 0: the likeliest token is taken."""
    top_k: int = 0
    """Of how many of the likeliest tokens one is drawn; 0: of all."""
    top_p: float = 1.0
    """Of the likeliest tokens, whose probabilities together come to this, one is drawn; 1: of all."""

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, (int, float), 0)
        require_number("top_k", self.top_k, int, 0)
        require_number("top_p", self.top_p, (int, float), 0, 1)
        if self.top_p == 0:
            raise ConfigError("0 leaves no token to draw; temperature=0 takes the likeliest one", key="top_p")

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return a token for each row of logits [rows, vocabulary]; `generator` is on their device.

        Raises:
            PenstockError: a logit is not a number, or tokens are to be drawn from infinite ones.
        """
        if logits.isnan().any():
            raise PenstockError("the logits are not numbers (NaN), so no token can be taken; look at the weights")
        scores = logits.float()
        if self.temperature == 0:
            return scores.argmax(-1)
        scores = scores / self.temperature
        if scores.isnan().any() or scores.isposinf().any():
            raise PenstockError(
                f"logits up to {logits.max().item():.3g}, divided by the temperature {self.temperature:g}, are too "
                "large for float32, so no token can be drawn; temperature=0 takes the likeliest one"
            )
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p < 1:
            scores = self._without_tail(scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    def _without_tail(self, scores: Tensor) -> Tensor:
        """Take out the least likely tokens, which come to 1 - top_p together; the likeliest one stays."""
        sorted_scores, tokens = scores.sort()
        is_tail = sorted_scores.softmax(-1).cumsum(-1) <= 1 - self.top_p
        is_tail[:, -1] = False
        return scores.masked_fill(is_tail.scatter(1, tokens, is_tail), -torch.inf)


def require_number(key: str, value: Any, kinds: Any, least: float, most: float = math.inf) -> None:
    """Refuse a setting that is no finite number of these types and this range. Raises: ConfigError."""
    if isinstance(value, bool) or not isinstance(value, kinds) or not (least <= value <= most and math.isfinite(value)):
        noun = "an integer" if kinds is int else "a number"
        upper = "" if most == math.inf else f" and at most {most}"
        raise ConfigError(f"{value!r}; expected {noun} of at least {least}{upper}", key=key)
