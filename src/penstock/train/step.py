"""One optimizer step: gradients of some batches added up, clipped over all ranks, and applied or skipped."""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock.errors import NotFinite, PenstockError
from penstock.execute.batch.stream import Stream, as_part
from penstock.execute.losses.results import StepResult
from penstock.ir.measured import Prologue
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.train.data.batches import Batch, BatchReader
from penstock.train.optimizing.precision import Precision
from penstock.train.optimizing.update import Update
from penstock.train.settings.sections import OptimizerSection
from penstock.train.settings.steps import learning_rate_at
from penstock.train.watching.progress import StepOutcome

Batches = BatchReader | Sequence[Batch | tuple[Tensor, Tensor] | Stream]
"""The batches of one optimizer step; each is read just before its pipeline step, so that waits for it are measured.

A pair is tokens and target. A `Stream` brings a batch one microbatch after another, on this rank's device already.
"""


def scale_over(num_batches: int) -> float | None:
    """Return the `scale_loss` of a pipeline whose gradients, added over so many batches of equal size, are those of
    their mean.

    It reaches every loss where its backward begins, those that layers add included, and nothing that is reported.
    """
    return None if num_batches == 1 else 1 / num_batches


class Trainer:
    """A pipeline with its optimizer; every rank holds one and calls it alike.

    For steps of several batches the pipeline's `scale_loss` is `scale_over` of their number; where that number changes,
    or losses are scaled against underflow, it is `scale_mean` of a `LossScaler`. A checkpoint needs
    `update.optimizer.state_dict()` and `update.state()` of the updates.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: OptimizerSection,
        *,
        num_steps: int,
        precision: Precision | None = None,
        embeddings: Collection[str] = (),
        norms: str = "off",
    ) -> None:
        """`norms` says which norms of gradients and parameters are logged, as `debug.norms` of a run file."""
        self.pipeline, self._norms = pipeline, norms
        self._options = options
        self._num_steps = num_steps
        self._precision = precision or Precision()
        self._region = partial(self._precision.region, pipeline.device)
        self.update = Update(pipeline, options, self._precision, embeddings)

    def step(
        self,
        number: int,
        batches: Batches,
        *,
        shares: Sequence[float] | None = None,
        record: bool = False,
        skip_update: bool = False,
    ) -> StepOutcome:
        """Run optimizer step `number`, counted from 1, on the sum of the batches' gradients.

        `shares` of the batches in the loss of the step add up to 1; by default they are equal, others need a
        `scale_loss` that is `scale_mean`. `record` measures the pipeline step of the last batch. `skip_update` changes
        no weight, and reduces no gradient over ranks.

        Raises:
            NotFinite: on every rank, if the loss or the gradient norm is not finite, and the precision says to stop or
                too many steps in a row were skipped; the weights stay as they were.
        """
        rate = learning_rate_at(number, self._options, self._num_steps)
        scale = self.update.loss_scale
        with self.pipeline.no_sync(tied=False) if skip_update else nullcontext():
            losses, moments_s = self._accumulate(batches, shares, record)
        loss = losses.mean
        recorded = self._gather(number, moments_s) if record else None
        norm = self.update.measure()
        if skip_update and self.pipeline.num_replicas > 1:
            # No gradient is summed over the replicas in a dry run, so each norm is of one replica. Their sum is not
            # finite on any rank if one of them is not.
            norm = sum(self.pipeline.control.across(norm))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite:
            self._require_tolerable(loss, norm, number, rate, batches)
        is_updated = is_finite and not skip_update
        if is_updated:
            self._log_norms(number, "gradient of")
            self.update.apply(rate)
            self._log_norms(number, "parameter")
        else:
            self.update.skip(is_overflow=not is_finite)
        return StepOutcome(
            loss=loss,
            gradient_norm=None if skip_update else norm,
            learning_rate=rate,
            recorded=recorded,
            named_losses=losses.named_means,
            is_updated=is_updated,
            loss_scale=scale,
            data_wait_s=losses.data_wait_s,
        )

    def evaluate(
        self, batches: Sequence[Batch | tuple[Tensor, Tensor]], weights: Sequence[float] | None = None
    ) -> float:
        """Return the mean loss of batches, by default of equal weight, in the precision of the steps."""
        with self._region():
            return mean_loss(self.pipeline, batches, weights)

    def _log_norms(self, number: int, kind: str) -> None:
        """Log the norms of this rank's parts, or on rank 0 those of all ranks; a collective where they are of all."""
        if self._norms == "off":
            return
        is_local, control = self._norms == "local", self.pipeline.control
        norms = self.pipeline.norms(gradients=kind != "parameter", local=is_local)
        rank = f"rank {control.names.numbers[control.rank]}, " if is_local else ""
        for name, norm in norms.items() if is_local or control.rank == 0 else ():
            logging.getLogger("penstock").info("%sstep %d: %s %s: norm %.6g", rank, number, kind, name, norm)

    def _require_tolerable(self, loss: float, norm: float, number: int, rate: float, batches: Batches) -> None:
        """Stop unless the step is to be skipped: by setting, or since gradients overflow under a loss scale."""
        options = self._precision.options
        is_overflow = self.update.loss_scale is not None and math.isfinite(loss)
        where = "" if is_overflow else self._find_first(batches)
        advice = advice_on(rate, self._options.clip_norm)
        if not is_overflow and options.not_finite == "stop":
            require_finite("the loss", loss, number, advice, where)
            require_finite("the gradient norm", norm, number, advice, where)
        if where and self.pipeline.control.rank == 0:
            logging.getLogger("penstock").warning("step %d is skipped. %s", number, where)
        if self.update.num_skipped_in_a_row + 1 >= options.most_skipped:
            scale = self.update.loss_scale
            fallen = "" if scale is None else f" The loss scale fell to {scale:g}."
            raise NotFinite(
                f"step {number}: {options.most_skipped} steps in a row were skipped (precision.most_skipped), the loss "
                f"is {loss} and the gradient norm {norm}.{fallen} {advice}"
            )

    def _find_first(self, batches: Batches) -> str:
        """Run the step's batches again and say where the first value that is not finite comes from; a collective.

        Empty where it does not happen again, and for a stream, whose data are gone.
        """
        num_steps, count = self.pipeline.step_number, len(batches)
        for index in range(count):
            batch = batches[index]
            if isinstance(batch, Stream):
                return ""
            self.update.optimizer.zero_grad(set_to_none=True)
            self.pipeline.step_number = num_steps - count + index  # so that layers draw the same numbers
            part = as_part(batch)
            with self._region():
                origin = self.pipeline.find_not_finite(*part.args, target=part.target, **part.kwargs)
            self.pipeline.step_number = num_steps
            if origin:
                return f"It begins on {origin}{f', batch {index + 1} of {count}' if count > 1 else ''}."
        return ""

    def _accumulate(
        self, batches: Batches, shares: Sequence[float] | None, record: bool
    ) -> tuple["_Losses", list[float]]:
        """Return the losses, and when this rank was free for the last pipeline step, had its batch, and asked for the
        step."""
        losses, read = _Losses(), self.pipeline.options.clock.read
        moments_s: list[float] = []
        for index in range(len(batches)):
            moments_s = [read()]
            batch = self._batch_of_step(batches, index)
            moments_s.append(read())
            losses.data_wait_s += moments_s[1] - moments_s[0]
            share = None if shares is None else shares[index]
            is_recorded = record and index == len(batches) - 1
            self.update.begin_batch(1 / len(batches) if share is None else share)
            with self._region():
                moments_s.append(read())
                result = self.pipeline.step(*batch.args, target=batch.target, record=is_recorded, **batch.kwargs)
            losses.add(result, 1.0 if share is None else share)
        return losses, moments_s

    def _batch_of_step(self, batches: Batches, index: int) -> Batch:
        """Return a batch, or the stream of one, as `Pipeline.step` takes it.

        Where this rank cannot read it, every rank raises the error, and none waits for this rank's step.
        """
        try:
            batch = batches[index]
        except PenstockError as error:
            self.pipeline.refuse(error)
        return Batch(batch) if isinstance(batch, Stream) else as_part(batch)

    def _gather(self, number: int, moments_s: list[float]) -> Timeline:
        """Put the recorded step together with what each rank of the replica did before it; a collective there."""
        recording = self.pipeline.recording
        assert recording is not None, "the last pipeline step was recorded"
        local_moments_s = [recording.from_own_clock(moment_s) for moment_s in moments_s]
        moments_by_rank: list[Any] = self.pipeline.control.within.all_gather_object(local_moments_s)
        return replace(
            recording.timeline, step=number, prologues=tuple(Prologue(*moments) for moments in moments_by_rank)
        )


@dataclass(slots=True, eq=False)
class _Losses:
    """The losses that the pipeline steps of one optimizer step reported, added up."""

    total: float = 0.0
    weights: float = 0.0
    sums_by_name: dict[str, float] = field(default_factory=dict)
    data_wait_s: float = 0.0
    """Seconds that this rank waited for the batches."""

    def add(self, result: StepResult, weight: float) -> None:
        assert result.loss is not None, "the pipeline has a loss"
        self.total += result.loss.item() * weight
        self.weights += weight
        if result.data_times is not None:
            self.data_wait_s += result.data_times.waited_s
        for name, loss in result.named_losses.items():
            self.sums_by_name[name] = self.sums_by_name.get(name, 0.0) + loss.item() * weight

    @property
    def mean(self) -> float:
        return self.total / self.weights

    @property
    def named_means(self) -> dict[str, float]:
        return {name: total / self.weights for name, total in self.sums_by_name.items()}


def require_finite(quantity: str, value: float, step: int, advice: str, where: str = "") -> None:
    """Refuse a value that is not finite; `where` says which layer or rank it comes from. Raises: NotFinite."""
    if not math.isfinite(value):
        parts = [f"step {step}: {quantity} is {value}; expected a finite number.", where, advice]
        raise NotFinite(" ".join(part for part in parts if part))


def advice_on(learning_rate: float, clip_norm: float) -> str:
    """Say what may keep a loss and its gradients finite."""
    clip = f"lower optimizer.clip_norm, which is {clip_norm:g}" if clip_norm else "clip with optimizer.clip_norm = 1.0"
    rate = f"The learning rate was {learning_rate:g}: lower optimizer.learning_rate, raise optimizer.warmup_steps"
    return f"{rate}, or {clip}"


def mean_loss(
    pipeline: Pipeline, batches: Iterable[Batch | tuple[Tensor, Tensor]], weights: Sequence[float] | None = None
) -> float:
    """Return the mean of the pipeline's loss over batches, without gradients; the same on every rank.

    `weights` are the numbers of targets that each batch's loss is the mean of; by default they are equal.
    """
    total = 0.0
    if not weights:
        batches = list(batches)
        weights = [1.0] * len(batches)
    for item, weight in zip(batches, weights, strict=True):
        batch = as_part(item)
        result = pipeline.evaluate(*batch.args, target=batch.target, **batch.kwargs)
        assert result.loss is not None, "the pipeline has a loss and got a target"
        total += result.loss.item() * weight
    return total / sum(weights)
