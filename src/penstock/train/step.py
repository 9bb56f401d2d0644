"""One optimizer step: gradients of some batches added up, clipped over all ranks, and applied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

from penstock.errors import NotFinite
from penstock.execute.batch.stream import Stream
from penstock.execute.losses.results import StepResult
from penstock.pipeline import Pipeline
from penstock.simulation.prologue import Prologue
from penstock.train.data import Batch
from penstock.train.optim import build_optimizer, learning_rate_at
from penstock.train.recorded_step import RecordedStep
from penstock.train.sections import OptimizerSection


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step was like, on every rank alike."""

    loss: float
    """Mean of the pipeline's losses over the batches."""
    gradient_norm: float
    """Over all ranks, before clipping."""
    learning_rate: float
    recorded: RecordedStep | None = None
    """What was measured in the last pipeline step, if it was to be recorded."""
    named_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean over the batches of every loss that has a name, those that layers add before their weights."""


class Batches(Protocol):
    """The batches of one optimizer step; each is asked for just before its pipeline step, so that waits for it show.

    A `Stream` brings a batch one microbatch after another, on this rank's device already.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch | Stream: ...


def scale_over(num_batches: int) -> float | None:
    """Return the `scale_loss` of a pipeline whose gradients, added over so many batches of equal size, are those of
    their mean.

    It reaches every loss where its backward begins, those that layers add included, and nothing that is reported.
    """
    return None if num_batches == 1 else 1 / num_batches


class Trainer:
    """A pipeline with its optimizer; every rank holds one and calls it alike.

    For steps of several batches the pipeline's `scale_loss` is `scale_over` of their number.
    """

    def __init__(self, pipeline: Pipeline, options: OptimizerSection, *, num_steps: int) -> None:
        self.pipeline = pipeline
        self._options = options
        self._num_steps = num_steps
        self._optimizer = build_optimizer(pipeline.named_parameters(), options)

    def step(self, number: int, batches: Batches, *, record: bool = False) -> StepOutcome:
        """Run optimizer step `number`, counted from 1, on the sum of the batches' gradients.

        `record` measures the pipeline step of the last batch.

        Raises:
            NotFinite: on every rank, if the loss or the gradient norm is not finite; the weights stay as they were.
        """
        rate = learning_rate_at(number, self._options, self._num_steps)
        losses, moments_s = self._accumulate(batches, record)
        loss = losses.mean
        recorded = self._gather(number, moments_s) if record else None
        require_finite("the loss", loss, number, rate)
        norm = self.pipeline.clip_grad_norm_(self._options.clip_norm or math.inf).item()
        require_finite("the gradient norm", norm, number, rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(loss, norm, rate, recorded, losses.named_means)

    def _accumulate(self, batches: Batches, record: bool) -> tuple["_Losses", list[float]]:
        """Return the losses, and when this rank was free for the last pipeline step, had its batch, and asked for the
        step."""
        losses, device, read = _Losses(), self.pipeline.device, self.pipeline.options.clock.read
        moments_s: list[float] = []
        for index in range(len(batches)):
            moments_s = [read()]
            batch = batches[index]
            moments_s.append(read())
            if not isinstance(batch, Stream):
                batch = batch[0].to(device), batch[1].to(device)
            moments_s.append(read())
            losses.add(self._run(batch, is_recorded=record and index == len(batches) - 1))
        return losses, moments_s

    def _run(self, batch: Batch | Stream, *, is_recorded: bool) -> StepResult:
        if isinstance(batch, Stream):
            return self.pipeline.step(batch, record=is_recorded)
        return self.pipeline.step(batch[0], target=batch[1], record=is_recorded)

    def _gather(self, number: int, moments_s: list[float]) -> RecordedStep:
        """Put the recorded step together with what each rank did before it; a collective."""
        recording = self.pipeline.recording
        assert recording is not None, "the last pipeline step was recorded"
        own = [recording.from_own_clock(moment_s) for moment_s in moments_s]
        everyone = cast(list[list[float]], self.pipeline.control.all_gather_object(own))
        return RecordedStep(
            number,
            recording.timeline,
            recording.message_bytes,
            tuple(self.pipeline.layers_of_stage),
            tuple(self.pipeline.layer_weights),
            tuple(Prologue(*moments) for moments in everyone),
        )


@dataclass(slots=True, eq=False)
class _Losses:
    """What the pipeline steps of one optimizer step reported, added up."""

    total: float = 0.0
    count: int = 0
    named: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        assert result.loss is not None, "the pipeline has a loss"
        self.total += result.loss.item()
        self.count += 1
        for name, loss in result.named_losses.items():
            self.named[name] = self.named.get(name, 0.0) + loss.item()

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def named_means(self) -> dict[str, float]:
        return {name: total / self.count for name, total in self.named.items()}


def require_finite(what: str, value: float, step: int, learning_rate: float) -> None:
    """Stop a run that has gone astray. Raises: NotFinite."""
    if not math.isfinite(value):
        raise NotFinite(
            f"step {step}: {what} is {value}; expected a finite number. The learning rate was {learning_rate:g}: lower "
            "optimizer.learning_rate, raise optimizer.warmup_steps, or lower optimizer.clip_norm (0 means no clipping)"
        )
