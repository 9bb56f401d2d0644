"""The decoder's shape: every key, its type, its default, its unit; the section [model] of a run file is made of it."""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from penstock.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class DecoderConfig(BaseModel):
    """The decoder's shape.

    Raises:
        pydantic.ValidationError: a value of the wrong type or out of its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocabulary: Positive = Field(description="number of token ids")
    width: Positive = Field(default=160, description="features per token between the blocks")
    layers: Positive = Field(default=4, le=100_000, description="decoder blocks")
    heads: Positive = Field(default=4, description="attention heads per block")
    key_value_heads: Positive = Field(default=4, description="heads of keys and values per block")
    hidden: Positive = Field(default=432, description="features inside the feed-forward part")
    length: Positive = Field(description="longest sequence in tokens")
    tied_head: bool = Field(default=False, description="whether the head shares the embedding's weight")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(default="float32", description="type of all parameters")

    @property
    def head_width(self) -> int:
        """Features per attention head."""
        return self.width // self.heads

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def problems(self, section: str = "") -> Iterator[tuple[str, str]]:
        """Yield each key that does not suit another one, and why; `section` goes before the keys, as in "model."."""
        if self.width % self.heads:
            yield f"{section}heads", f"{self.heads} heads do not divide {section}width = {self.width}"
        elif self.head_width % 2:
            yield (
                f"{section}heads",
                f"{section}width / {section}heads = {self.head_width} must be even, because rotary embedding turns "
                "pairs of features",
            )
        if self.heads % self.key_value_heads:
            yield f"{section}key_value_heads", f"{self.key_value_heads} does not divide {section}heads = {self.heads}"

    def require_no_problem(self) -> None:
        """Raise the first of the problems. Raises: ConfigError."""
        for key, problem in self.problems():
            raise ConfigError(problem, key=key)
