"""`StepLosses`: computes the losses of one step, notes them, and makes them the beginnings of backwards.

`LossMaker` makes those of each step, and weighs its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError, warn
from penstock.execute.batch.local_batch import Batch
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.control.agreement import AgreedStep, BatchWeight
from penstock.execute.control.error_notes import note_place, without_target
from penstock.execute.losses.ignored import IGNORED, CountedTargets, count_ignored, uneven_targets
from penstock.execute.losses.loss import Loss, LossCounts, LossShares, LossWeights, Scale, apply_scale, numbers_text
from penstock.execute.losses.output import LossName, LossParts, read_loss, takes_weight
from penstock.execute.values.tree import needing_gradient

NO_SHARES = LossShares([], [])


@dataclass(slots=True, eq=False)
class StepLosses:
    """The losses of one step; what was computed is detached."""

    num_microbatches: int
    num_slices: int
    """Number of slices of each microbatch."""
    loss: Loss | None = None
    """The loss function; None where no loss is computed."""
    shares: LossShares = NO_SHARES
    """Shares of the loss function's losses, on the ranks of last stages; empty elsewhere."""
    auxiliary_shares: LossShares = NO_SHARES
    """Shares of the losses that layers add, on every rank."""
    takes_weight: bool = False
    """Whether the loss function is called with the factor of its loss."""
    weigh_nothing: bool = False
    """Whether all losses of the step weigh nothing, in all replicas."""
    scale: Scale | None = None
    """Function that scales a loss where its backward begins."""
    num_averaged: int = 1
    """Number of replicas over which gradients are averaged, by which losses are multiplied where backwards begin."""
    examine_target: Callable[[MicrobatchKey, Any], None] | None = None
    """Called with each target of a stream, which nobody has seen when its losses are weighed."""
    computed: dict[MicrobatchKey, Tensor] = field(default_factory=dict)
    """The loss that the loss function returned; filled on the ranks of last stages."""
    named_losses: dict[LossName, dict[MicrobatchKey, Tensor]] = field(default_factory=dict)
    """Losses that have a name, of this rank's layers and loss function, 0-dim and in float64."""
    reported: dict[MicrobatchKey, Any] = field(default_factory=dict)
    """The values that the loss function reported; filled on the ranks of last stages."""

    def compute(self, place: MicrobatchKey, outputs: Any, target: Any, *, is_training: bool) -> Tensor | None:
        """Compute the loss of one microbatch or slice, keep a copy for the result of the step, and return its root.

        `place` is the microbatch and the slice. The root is the tensor at which the backward begins: the loss times its
        share of the loss of the batch (`factor`), `num_averaged` and the loss scale. What is kept is the loss without
        them. The result is None without a loss function, outside training, and where the share is 0.

        Raises:
            PipelineError: the value that the loss function returned is no loss, or does not depend on the outputs.
        """
        if self.loss is None:
            return None
        if self.examine_target is not None:
            self.examine_target(place, target)
        factor = self.shares.factor(*place)
        # A loss function may return several values: the loss, parts of it by name, and what the caller wants reported.
        named_factors = self.shares.named_factors(*place) if self.shares.by_name else None
        parts = self._loss_parts(self.loss, place, outputs, target, named_factors or factor)
        # The loss is copied: several of torch's means, as mse_loss, keep the memory of all elements, and a loss
        # function may add to what it has returned.
        self.computed[place] = parts.loss.detach().clone()
        for name, loss in parts.named_losses.items():
            self.note(LossName(name, is_auxiliary=False, dtype=loss.dtype), place, loss)
        if parts.reported is not None:
            self.reported[place] = parts.reported
        if not is_training:
            return None
        if factor and not parts.loss.requires_grad and needing_gradient(outputs):
            raise PipelineError(
                f"microbatch {place[0]}: the loss does not depend on the output any more, so nothing would be "
                "trained; compute it from the output without detach(), item() or no_grad()"
            )
        if not (factor and named_factors):
            return self.root_of(parts.loss, factor)
        terms = [parts.named_losses[name] * share for name, share in named_factors.items() if share]
        return self.root_of(sum(terms[1:], start=terms[0]), 1.0)

    def note(self, name: LossName, place: MicrobatchKey, loss: Tensor) -> None:
        """Remember a loss by its name; losses of several stages of this rank are added up."""
        # They are added in float64, so that it matters little which stages share a rank.
        losses_by_place = self.named_losses.setdefault(name, {})
        exact = loss.detach().to(torch.float64, copy=True)  # a layer may go on to change it
        losses_by_place[place] = losses_by_place[place] + exact if place in losses_by_place else exact

    def root_of(self, loss: Tensor, factor: float) -> Tensor | None:
        """Return where the backward of a loss begins: weighted and scaled; None where it weighs nothing.

        A weight of 0 means no tokens: such a loss may be NaN, and 0 x NaN would reach every weight.
        """
        if not factor:
            return None
        weighted = loss * (factor * self.num_averaged)
        return weighted if self.scale is None else apply_scale(self.scale, weighted)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of a loss function that is a module; empty for a plain function."""
        return [*self.loss.parameters()] if isinstance(self.loss, nn.Module) else []

    def forgetting(self) -> "StepLosses":
        """Return the same rules without losses, for forwards that run again."""
        return replace(self, computed={}, named_losses={}, reported={})

    def _loss_parts(
        self, loss: Loss, place: MicrobatchKey, outputs: Any, target: Any, factor: float | dict[str, float]
    ) -> LossParts:
        """Call the loss function, which gets `factor` too if it takes a `weight`, and return what it returned."""
        try:
            value = loss(outputs, target, weight=factor) if self.takes_weight else loss(outputs, target)
        except Exception as error:
            note_place(error, without_target("the loss function", target))
            raise
        return read_loss(value, place[0], self.shares.count(*place))


class LossMaker:
    """The rules of one rank for its losses: weighs each batch, with replicas as a share of the job.

    `is_last`: whether the rank holds a last stage, and so computes some. `num_averaged`: of how many replicas gradients
    are averaged; 1 where they are summed.
    """

    def __init__(
        self, loss: Loss | None, weights: LossWeights, scale: Scale | None, *, is_last: bool, num_averaged: int = 1
    ) -> None:
        self._loss = loss
        self._weights, self._row_weights = weights, weights.of_rows
        self._scale = scale
        self._num_averaged = num_averaged
        self._is_last = is_last
        self.has_loss = loss is not None
        self._takes_weight = loss is not None and takes_weight(loss)
        self._last_counts: tuple[LossCounts, LossCounts] | None = None
        """Counts of the batch that was weighed last: its rows, and what its losses are weighed by."""
        is_by_rows = weights.reduction == "mean" and weights.count is None
        self._may_ignore = loss is not None and is_last and is_by_rows
        """Whether the loss function may leave out targets of a batch; False once a batch has been warned of."""
        self._first_streamed: tuple[MicrobatchKey, list[float]] | None = None
        """The first microbatch or slice of a step on a stream, with its shares of ignored targets."""

    def weigh(self, batch: Batch, agreed: AgreedStep) -> BatchWeight:
        """Return the weight of a batch among those of all replicas. Raises: PipelineError, as `count` does."""
        rows, counts = self._last_counts = self._measure(batch, agreed)
        return BatchWeight(sum(rows.microbatches), sum(counts.microbatches), len(rows.microbatches), counts.totals())

    def of(self, batch: Batch, agreed: AgreedStep) -> StepLosses:
        """Return the losses of a step, which are still to be computed. Raises: PipelineError, as `count` does."""
        (rows, counts), self._last_counts = self._last_counts or self._measure(batch, agreed), None
        counts_of_job = rows_of_job = named_counts_of_job = None
        if (job := agreed.weight) is not None:
            counts_of_job = job.count, job.num_microbatches
            rows_of_job = job.rows, job.num_microbatches
            named_counts_of_job = job.named_counts
            if counts.microbatches and counts.by_name.keys() != job.named_counts.keys():
                raise PipelineError(
                    f"count returned {numbers_text(counts.by_name)} for the targets of this replica, but "
                    f"{numbers_text(job.named_counts)} for those of all replicas; return a number for each loss that "
                    "the loss function names, 0 where a target has nothing for it"
                )
        loss = self._loss if agreed.is_training or batch.has_target else None
        weights = self._weights
        self._first_streamed = None
        shares = NO_SHARES
        if loss is not None and self._is_last:
            shares = weights.shares_of(counts, counts_of_job, named_counts_of_job)
        return StepLosses(
            len(batch.slices),
            len(batch.slices[0]),
            loss,
            shares,
            self._row_weights.shares_of(rows, rows_of_job),
            takes_weight=self._takes_weight,
            weigh_nothing=not any(shares.weights) and (job is None or not job.count),
            scale=self._scale,
            num_averaged=self._num_averaged,
            examine_target=self._examine_streamed if self._may_ignore and batch.reader is not None else None,
        )

    def _measure(self, batch: Batch, agreed: AgreedStep) -> tuple[LossCounts, LossCounts]:
        rows = self._row_weights.measure(batch.microbatches, batch.slices)
        # The other ranks may have no target to count.
        is_counting = self._is_last and self._loss is not None and (agreed.is_training or batch.has_target)
        if is_counting and self._may_ignore and self._weights.counted is None:
            self._warn_of_ignored([microbatch.target for microbatch in batch.microbatches])
        return rows, self._weights.measure(batch.microbatches, batch.slices) if is_counting else rows

    def _warn_of_ignored(self, targets: Sequence[Any]) -> None:
        pair = uneven_targets(targets)
        if pair is None:
            return
        self._may_ignore = False
        counts = [f"microbatch {index} has {count_ignored(targets[index])} targets of {IGNORED}" for index in pair]
        warn(
            f"{' and '.join(counts)}, but microbatches weigh by their rows. If the loss leaves such targets out, that "
            "of the batch is not what it is in one piece. Pass Pipeline count=..., a function that counts the targets "
            f"that a loss is the mean of, such as lambda target: (target != {IGNORED}).sum()"
        )

    def _examine_streamed(self, place: MicrobatchKey, target: Any) -> None:
        """Warn of a microbatch of a stream whose targets weigh otherwise in the loss than those of the first one."""
        counted = self._weights.counted or CountedTargets(IGNORED)
        shares = counted.streamed_shares(target)
        first_place, first_shares = self._first_streamed = self._first_streamed or (place, shares)
        if shares == first_shares or not self._may_ignore:
            return
        self._may_ignore = False
        place_text, first_text = (f"microbatch {key[0]}, slice {key[1]}" for key in (place, first_place))
        difference, reason = f"another share of the targets is {counted.ignored}", "If the loss leaves such targets out"
        if counted.class_weights is not None:
            difference = "the targets are of classes that weigh otherwise"
            reason = "Since the loss divides by these weights"
        warn(
            f"in {place_text} of a stream {difference} than in {first_text}, but both weigh by their rows. {reason}, "
            "that of the batch is not what it is in one piece. Pass the batch whole (as PreSplit), where "
            "F.cross_entropy and nn.CrossEntropyLoss weigh by the other targets and another loss takes count=..., or "
            "use reduction='sum'"
        )
