"""How the losses of microbatches are weighted, so that their gradients add up to those of the unsplit batch.

The rule: weight = share / total in float64, once per batch. The share of a microbatch is its rows, or the number of
targets that torch's cross entropy does not ignore (by the weights of their classes, if any), or what `count` says of
its target; the total is the sum of the shares in microbatch order. Equal sizes give exactly 1/m. Where `count` returns
a dict, the rule holds for every named loss by itself, with the counts of its name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PipelineError, listed, nearest
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.control.error_notes import note_place, without_target
from penstock.execute.losses.ignored import CountedTargets
from penstock.execute.losses.output import LossValue

Loss = Callable[..., LossValue]
"""Takes the output and the target of a microbatch. Where it has a keyword-only parameter `weight`, it is told the
factor in the loss of the batch, by which what it returns is multiplied afterwards; a dict of factors by name, where
`count` returns a dict."""
Count = Callable[[Any], float | Tensor | Mapping[str, float | Tensor]]
"""Takes the target of a microbatch, returns the number of samples or tokens that its loss is the mean of; or a dict of
such numbers, one for each loss that the loss function returns by name."""
Scale = Callable[[Tensor], Tensor]
"""Takes a loss of 0 dimensions where its backward begins, returns it scaled, such as `torch.amp.GradScaler.scale`."""

REDUCTIONS = ("mean", "sum")
_UNNAMED = ""
"""Stands in the place of a name for the number of a `count` that returns no dict."""


@dataclass(frozen=True, slots=True)
class LossShares:
    """The part that each loss has in the loss of the batch."""

    weights: Sequence[float]
    """Factor of each microbatch in the loss of the batch."""
    fractions: Sequence[Sequence[float]]
    """Factor of each slice of each microbatch in the loss of its microbatch; 1 where microbatches are not cut."""
    counts: Sequence[Sequence[float]] | None = None
    """Count of the target of each slice of each microbatch, as `count` said; None without a `count`."""
    by_name: Mapping[str, "LossShares"] = field(default_factory=dict)
    """Shares of each named loss, where `count` returns a dict; then the shares above are by the sums of its numbers."""

    def factor(self, microbatch: int, slice: int) -> float:
        """Return the factor in the loss of the batch."""
        return self.weights[microbatch] * self.fractions[microbatch][slice]

    def named_factors(self, microbatch: int, slice: int) -> dict[str, float]:
        """Return the factor of each named loss in that loss of the batch; empty where all have the same factor."""
        return {name: shares.factor(microbatch, slice) for name, shares in self.by_name.items()}

    def count(self, microbatch: int, slice: int) -> float | dict[str, float] | None:
        """Return what `count` said of a target, as numbers; None without a `count`."""
        if self.by_name:
            columns = {name: shares.counts for name, shares in self.by_name.items()}
            return {name: counts[microbatch][slice] for name, counts in columns.items() if counts is not None}
        return None if self.counts is None else self.counts[microbatch][slice]


@dataclass(frozen=True, slots=True)
class LossCounts:
    """The numbers that losses of a batch are weighed by: its rows and lengths, or what `count` says of its targets."""

    microbatches: Sequence[float]
    """Number of each microbatch."""
    slices: Sequence[Sequence[float]]
    """Number of each slice of each microbatch."""
    is_counted: bool = False
    by_name: Mapping[str, "LossCounts"] = field(default_factory=dict)
    """Numbers for each named loss, where `count` returns a dict; then the numbers above are their sums."""

    def totals(self) -> dict[str, float]:
        """Return the number of the whole batch for each named loss that has numbers of its own."""
        return {name: sum(counts.microbatches) for name, counts in self.by_name.items()}


@dataclass(frozen=True, slots=True)
class LossWeights:
    """How the loss function reduces: by the mean over the rows (or over what `count` counts), or by the sum.

    Raises:
        ConfigError: an unknown reduction, or a sum with a `count`.
    """

    reduction: str = "mean"
    count: Count | None = None
    counted: CountedTargets | None = None
    """The targets that the loss function is a mean over, where they are known."""

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(
                f"{self.reduction!r} is no reduction; expected 'mean' or 'sum'."
                f"{nearest(str(self.reduction), REDUCTIONS)}",
                key="reduction",
            )
        if self.reduction == "sum" and self.count is not None:
            raise ConfigError("a sum is not divided by a count; drop count, or use reduction='mean'", key="count")

    def measure(self, microbatches: Sequence[Microbatch], slices: Sequence[Sequence[Microbatch]]) -> LossCounts:
        """Return what losses are weighed by.

        A slice counts as its length in the sequence, or as what `count` says of its target. Where the loss function is
        torch's cross entropy, both count the targets that it is a mean over.

        Raises:
            PipelineError: a count is negative or not finite, the slices do not count what their microbatch does, or
                targets are counted under different names.
        """
        if self.count is None:
            sizes = [self._share(microbatch, microbatch.size) for microbatch in microbatches]
            return LossCounts(sizes, [[self._share(part, part.length) for part in row] for row in slices])
        counts = [_counted(self.count, microbatch) for microbatch in microbatches]
        counts_of_slices = [_counted_slices(self.count, *pair) for pair in zip(counts, slices, strict=True)]
        return _by_name(counts, counts_of_slices)

    def shares_of(
        self, counts: LossCounts, job: tuple[float, int] | None = None, job_totals: Mapping[str, float] | None = None
    ) -> LossShares:
        """Return the factors of all microbatches and of their slices.

        All counts zero gives zeros; where nothing is split (no rows), a mean weighs all microbatches the same. With
        replicas, `job` is what all of them measure together, and how many microbatches they have; `job_totals` is
        what they measure for each named loss.
        """
        total, num_microbatches = (sum(counts.microbatches), len(counts.microbatches)) if job is None else job
        # Where nothing counts, the losses of the slices are shown as they are: not a number.
        fractions = [self._parts_of(sum(row), len(row), row) for row in counts.slices]
        weights = self._parts_of(total, num_microbatches, counts.microbatches)
        if not counts.is_counted:
            return LossShares(weights, fractions)
        by_name = {
            name: self.shares_of(named_counts, job and ((job_totals or {})[name], num_microbatches))
            for name, named_counts in counts.by_name.items()
        }
        return LossShares(weights if total else [0.0] * len(weights), fractions, counts.slices, by_name)

    @property
    def of_rows(self) -> "LossWeights":
        """The weights of losses that no target counts for, which every rank knows: by rows and lengths."""
        return LossWeights(self.reduction)

    def _share(self, part: Microbatch, size: float) -> float:
        return size if self.counted is None else self.counted.share(part.target, size)

    def _parts_of(self, total: float, num_parts: int, shares: Sequence[float]) -> list[float]:
        """Return the fractions of a whole that parts with these shares make up, for a mean; alike without shares."""
        if self.reduction == "sum":
            return [1.0] * len(shares)
        return [share / total for share in shares] if total else [1.0 / num_parts] * len(shares)


_Numbers = dict[str, float]
"""What `count` returned for one target, by names of losses; for all together under `_UNNAMED`."""


def _counted(count: Count, microbatch: Microbatch) -> _Numbers:
    try:
        value: Any = count(microbatch.target)
        numbers = {
            name: float(number) for name, number in (value if isinstance(value, Mapping) else {_UNNAMED: value}).items()
        }
    except Exception as error:
        note_place(error, without_target("count", microbatch.target))
        raise
    if not numbers:
        raise PipelineError(
            f"microbatch {microbatch.index}: count returned an empty dict for its target; expected a number for each "
            "loss that the loss function returns by name, or one number for all"
        )
    if isinstance(value, Mapping) and not all(isinstance(name, str) and name for name in numbers):
        raise PipelineError(
            f"microbatch {microbatch.index}: count returned a dict with the names {list(numbers)} for its target; "
            "expected the names of the losses that the loss function returns, each a text that is not empty"
        )
    for name, number in numbers.items():
        if not (math.isfinite(number) and number >= 0):
            raise PipelineError(
                f"microbatch {microbatch.index}: count returned {number} for its target{_as_named(name)}; expected a "
                "finite number, 0 or larger. Count samples or tokens, not losses"
            )
    return numbers


def _counted_slices(count: Count, totals: _Numbers, slices: Sequence[Microbatch]) -> list[_Numbers]:
    if len(slices) == 1:
        return [totals]
    numbers_of_slices = [_counted(count, part) for part in slices]
    for name, total in totals.items():
        counts = [numbers.get(name, 0.0) for numbers in numbers_of_slices]
        if not math.isclose(total, sum(counts), rel_tol=1e-9):
            raise PipelineError(
                f"microbatch {slices[0].index}: count returned {total:g} for its target{_as_named(name)}, but {counts} "
                "for the targets of its slices, which is not the same in all; count what the loss of a slice is the "
                "mean of, such as tokens"
            )
    return numbers_of_slices


def _by_name(microbatches: Sequence[_Numbers], slices: Sequence[Sequence[_Numbers]]) -> LossCounts:
    """Put the numbers of all microbatches together for each name, and their sums for all names."""
    names = list(microbatches[0]) if microbatches else [_UNNAMED]
    for index, (numbers, numbers_of_slices) in enumerate(zip(microbatches, slices, strict=True)):
        for part in (numbers, *numbers_of_slices):
            if part.keys() != set(names):
                raise PipelineError(
                    f"microbatch {index}: count returned {numbers_text(part)} for its target or a slice of it, but "
                    f"{numbers_text(names)} for that of microbatch 0; return a number for each loss that the loss "
                    "function names, 0 where a target has nothing for it"
                )
    by_name = {
        name: LossCounts(
            [numbers[name] for numbers in microbatches],
            [[numbers[name] for numbers in row] for row in slices],
            is_counted=True,
        )
        for name in names
    }
    if _UNNAMED in by_name:
        return by_name[_UNNAMED]
    sums_of_slices = [[sum(numbers.values()) for numbers in row] for row in slices]
    return LossCounts([sum(numbers.values()) for numbers in microbatches], sums_of_slices, True, by_name)


def _as_named(name: str) -> str:
    return f" as {name!r}" if name else ""


def numbers_text(names: Iterable[str]) -> str:
    """Describe what a `count` returned, by the names in its dict; there are none where it returned a number."""
    return "a number" if list(names) in ([], [_UNNAMED]) else f"numbers for {listed(list(map(repr, names)))}"


def refuse_loss_parameters(loss: Loss | None, layer_params: Iterable[nn.Parameter]) -> None:
    """Refuse a loss with trainable parameters that no layer has: nothing sums their gradients over the replicas.

    Raises:
        ConfigError: naming the parameters.
    """
    module: object = loss
    while isinstance(module, partial):
        module = module.func
    if not isinstance(module, nn.Module):
        return
    reduced_ids = set(map(id, layer_params))
    names = [name for name, param in module.named_parameters() if param.requires_grad and id(param) not in reduced_ids]
    if names:
        raise ConfigError(
            f"{type(module).__name__} has trainable parameters that are of no layer here ({listed(names)}), so their "
            "gradients would be those of one replica; put them into the last layer, or freeze them",
            key="loss",
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
    text = f"a {type(scaled).__name__}"
    if isinstance(scaled, Tensor):
        text = f"a tensor of shape {tuple(scaled.shape)} {'with' if scaled.requires_grad else 'without'} a gradient"
    raise PipelineError(
        f"scale_loss returned {text} for a loss {'with' if loss.requires_grad else 'without'} one; return the loss "
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
