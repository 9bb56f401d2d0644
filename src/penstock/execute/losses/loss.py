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
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.control.error_notes import note_place, without_target
from penstock.execute.losses.output import LossValue

Loss = Callable[..., LossValue]
"""Takes the output and the target of a microbatch. Where it has a keyword-only parameter `weight`, it is told the
factor in the loss of the batch, by which what it returns is multiplied afterwards."""
Count = Callable[[Any], float | Tensor]
"""Takes the target of a microbatch, returns the number of samples or tokens that its loss is the mean of."""
Scale = Callable[[Tensor], Tensor]
"""Takes a loss of 0 dimensions where its backward begins, returns it scaled, such as `torch.amp.GradScaler.scale`."""

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class LossShares:
    """What part each loss has in the loss of the batch."""

    weights: Sequence[float]
    """Per microbatch, its factor in the loss of the batch."""
    fractions: Sequence[Sequence[float]]
    """Per microbatch and slice, the factor in the loss of the microbatch; 1 where microbatches are not cut."""
    counts: Sequence[Sequence[float]] | None = None
    """Per microbatch and slice, what `count` said of its target; None without a `count`."""

    def factor(self, microbatch: int, slice: int) -> float:
        """Return the factor in the loss of the batch."""
        return self.weights[microbatch] * self.fractions[microbatch][slice]

    def count(self, microbatch: int, slice: int) -> float | None:
        """Return what `count` said of a target; None without a `count`."""
        return None if self.counts is None else self.counts[microbatch][slice]


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

    def shares(self, microbatches: Sequence[Microbatch], slices: Sequence[Sequence[Microbatch]]) -> LossShares:
        """Return the factors of all microbatches and of their slices.

        All counts zero gives zeros; where nothing is split (no rows), a mean weighs all microbatches the same. A slice
        counts as its length in the sequence, or as what `count` says of its target.

        Raises:
            PipelineError: a count is negative or not finite, or the slices do not count what their microbatch does.
        """
        wholes = self._counts(microbatches)
        weights = self._weights(microbatches, wholes)
        if wholes is None:
            return LossShares(weights, [self._fractions([part.length for part in parts]) for parts in slices])
        counts = [self._counts_of_slices(*pair) for pair in zip(wholes, slices, strict=True)]
        return LossShares(weights, [self._fractions(each) for each in counts], counts)

    def shares_of_rows(self, microbatches: Sequence[Microbatch], slices: Sequence[Sequence[Microbatch]]) -> LossShares:
        """Return the factors of losses that no target counts for, which every rank knows: by rows and lengths."""
        return LossWeights(self.reduction).shares(microbatches, slices)

    def _counts(self, microbatches: Sequence[Microbatch]) -> list[float] | None:
        if self.count is None:
            return None
        return [_counted(self.count, microbatch) for microbatch in microbatches]

    def _counts_of_slices(self, whole: float, parts: Sequence[Microbatch]) -> list[float]:
        if len(parts) == 1:
            return [whole]
        assert self.count is not None
        counts = [_counted(self.count, part) for part in parts]
        _require_additive(whole, counts, parts[0].index)
        return counts

    def _weights(self, microbatches: Sequence[Microbatch], counts: Sequence[float] | None) -> list[float]:
        if self.reduction == "sum":
            return [1.0] * len(microbatches)
        shares = counts
        if shares is None:
            shares = [float(microbatch.size) for microbatch in microbatches]
            shares = shares if any(shares) else [1.0] * len(microbatches)
        total = sum(shares) or 1.0
        return [share / total for share in shares]

    def _fractions(self, shares: Sequence[float]) -> list[float]:
        if len(shares) == 1 or self.reduction == "sum":
            return [1.0] * len(shares)
        total = sum(shares)
        # Where nothing counts, the losses of the slices are shown as they are: not a number.
        return [share / total for share in shares] if total else [1.0 / len(shares)] * len(shares)


def _counted(count: Count, microbatch: Microbatch) -> float:
    try:
        share = float(count(microbatch.target))
    except Exception as error:
        note_place(error, without_target("count", microbatch.target))
        raise
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


def loss_scale(scale: float | Scale | None) -> Scale | None:
    """Return the function that scales a loss where its backward begins; None where nothing is scaled.

    Raises:
        ConfigError: a number that is not finite and larger than 0.
    """
    if scale is None or callable(scale):
        return scale
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ConfigError(
            f"{scale!r} scales no loss; expected a finite number larger than 0, or a function of the loss",
            key="scale_loss",
        )
    return lambda loss: loss * scale


def apply_scale(scale: Scale, loss: Tensor) -> Tensor:
    """Return a weighted loss scaled.

    Raises:
        PipelineError: the function returns something that no backward can begin at.
    """
    scaled: object = scale(loss)
    if isinstance(scaled, Tensor) and scaled.numel() == 1 and scaled.requires_grad == loss.requires_grad:
        return scaled.reshape(())
    found = f"a {type(scaled).__name__}"
    if isinstance(scaled, Tensor):
        found = f"a tensor of shape {tuple(scaled.shape)} {'with' if scaled.requires_grad else 'without'} a gradient"
    raise PipelineError(
        f"scale_loss returned {found} for a loss {'with' if loss.requires_grad else 'without'} one; return the loss "
        "times a number, computed from it without detach() or item()"
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
