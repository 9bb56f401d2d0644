"""How the losses of microbatches are weighted, so that their gradients add up to those of the unsplit batch.

The rule: weight = share / total in float64, once per batch. The share of a microbatch is its rows, or what `count`
says of its target; the total is the sum of the shares in microbatch order. Equal sizes give exactly 1/m.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PipelineError, nearest
from penstock.execute.microbatch import Microbatch

Loss = Callable[[Any, Any], Tensor]
"""Takes the output and the target of a microbatch, returns one number, a tensor of shape [] or [1]."""
Count = Callable[[Any], float | Tensor]
"""Takes the target of a microbatch, returns the number of samples or tokens that its loss is the mean of."""

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class LossShares:
    """What part each loss has in the loss of the batch."""

    weights: Sequence[float]
    """Per microbatch, its factor in the loss of the batch."""
    fractions: Sequence[Sequence[float]]
    """Per microbatch and slice, the factor in the loss of the microbatch; 1 where microbatches are not cut."""

    def factor(self, microbatch: int, slice: int) -> float:
        """Return the factor in the loss of the batch."""
        return self.weights[microbatch] * self.fractions[microbatch][slice]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What the loss function returns: the mean over the rows (or over what `count` counts), or the sum.

    Raises:
        ConfigError: an unknown reduction, or a sum with a `count`.
    """

    reduction: str = "mean"
    count: Count | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(
                f"{self.reduction!r} is no reduction; expected 'mean' or 'sum'."
                f"{nearest(str(self.reduction), REDUCTIONS)}",
                key="reduction",
            )
        if self.reduction == "sum" and self.count is not None:
            raise ConfigError("a sum is not divided by a count; drop count, or use reduction='mean'", key="count")

    def of(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """Return the factor of each microbatch's loss.

        All counts zero gives zeros; where nothing is split (no rows), a mean weighs all microbatches the same.

        Raises:
            PipelineError: a count is negative or not finite.
        """
        if self.reduction == "sum":
            return [1.0] * len(microbatches)
        if self.count is not None:
            shares = [_counted(self.count, microbatch) for microbatch in microbatches]
        else:
            shares = [float(microbatch.size) for microbatch in microbatches]
            shares = shares if any(shares) else [1.0] * len(microbatches)
        total = sum(shares) or 1.0
        return [share / total for share in shares]

    def shares(self, microbatches: Sequence[Microbatch], slices: Sequence[Sequence[Microbatch]]) -> LossShares:
        """Return the factors of all microbatches and of their slices.

        A slice counts as its length in the sequence, or as what `count` says of its target.

        Raises:
            PipelineError: a count is negative or not finite, or the slices do not count what their microbatch does.
        """
        pairs = zip(microbatches, slices, strict=True)
        return LossShares(self.of(microbatches), [self._fractions(whole, parts) for whole, parts in pairs])

    def _fractions(self, whole: Microbatch, parts: Sequence[Microbatch]) -> list[float]:
        if len(parts) == 1 or self.reduction == "sum":
            return [1.0] * len(parts)
        if self.count is None:
            shares = [float(part.length) for part in parts]
        else:
            shares = [_counted(self.count, part) for part in parts]
            _require_additive(_counted(self.count, whole), shares, whole.index)
        total = sum(shares)
        # Where nothing counts, the losses of the slices are shown as they are: not a number.
        return [share / total for share in shares] if total else [1.0 / len(parts)] * len(parts)


def microbatch_weights(
    microbatches: Sequence[Microbatch], reduction: str = "mean", count: Count | None = None
) -> list[float]:
    """Return the factor of each microbatch's loss, see `LossWeights`."""
    return LossWeights(reduction, count).of(microbatches)


def _counted(count: Count, microbatch: Microbatch) -> float:
    share = float(count(microbatch.target))
    if not (math.isfinite(share) and share >= 0):
        raise PipelineError(
            f"microbatch {microbatch.index}: count returned {share} for its target; expected a finite number, 0 or "
            "larger. Count samples or tokens, not losses"
        )
    return share


def _require_additive(whole: float, parts: Sequence[float], microbatch: int) -> None:
    if not math.isclose(whole, sum(parts), rel_tol=1e-9):
        raise PipelineError(
            f"microbatch {microbatch}: count returned {whole:g} for its target, but {parts} for the targets of its "
            "slices, which is not the same in all; count what the loss of a slice is the mean of, such as tokens"
        )


def scalar_loss(loss: object, microbatch: int) -> Tensor:
    """Return what a loss function gave for a microbatch as a 0-dim tensor; one of shape [1] is reshaped.

    Raises:
        PipelineError: it is something else.
    """
    if isinstance(loss, Tensor) and tuple(loss.shape) in ((), (1,)) and loss.is_floating_point():
        return loss if loss.dim() == 0 else loss.reshape(())
    found = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {tuple(loss.shape)} and type {str(loss.dtype).removeprefix('torch.')}"
    raise PipelineError(
        f"microbatch {microbatch}: the loss function returned {found}; expected a floating-point tensor without "
        "dimensions, or of shape [1]. Reduce it with .mean() or .sum()"
    )


def combine_losses(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the batch's loss: the sum of loss * weight in microbatch order, in the losses' dtype, without graph.

    A microbatch of weight 0 adds nothing, even where its loss is the mean of no tokens and so not a number.
    """
    if not losses or len(losses) != len(weights):
        raise PipelineError(f"{len(losses)} losses for {len(weights)} weights; expected one loss per microbatch")
    total = torch.zeros_like(losses[0])
    for loss, weight in zip(losses, weights, strict=True):
        if weight:
            total = total + loss.detach() * weight
    return total
