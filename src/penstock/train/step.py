"""One optimizer step: gradients of some batches added up, clipped over all ranks, and applied."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from penstock.simulate.lead_in import LeadIn
from penstock.train.data import Batch
from penstock.train.optim import OptimizerOptions, build_optimizer, clip_gradients, learning_rate_at
from penstock.train.recorded_step import RecordedStep


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step was like, on every rank alike."""

    loss: float
    """Sum of the pipeline's losses over the batches."""
    gradient_norm: float
    """Over all ranks, before clipping."""
    learning_rate: float
    recorded: RecordedStep | None = None
    """What was measured in the last pipeline step, if it was to be recorded."""


class Batches(Protocol):
    """The batches of one optimizer step; each is asked for just before its pipeline step, so that waits for it show."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


def loss_over(loss: Callable[[Any, Any], Tensor], num_batches: int) -> Callable[[Any, Any], Tensor]:
    """Return the loss whose gradients, added over so many batches of equal size, are those of their mean."""
    if num_batches == 1:
        return loss

    def part_of_mean(output: Any, target: Any) -> Tensor:
        return loss(output, target) / num_batches

    return part_of_mean


class Trainer:
    """A pipeline with its optimizer; every rank holds one and calls it alike."""

    def __init__(self, pipeline: Pipeline, options: OptimizerOptions) -> None:
        self.pipeline = pipeline
        self._options = options
        self._optimizer = build_optimizer(pipeline.named_parameters(), options)

    def step(self, number: int, batches: Batches, *, record: bool = False) -> StepOutcome:
        """Run optimizer step `number`, counted from 1, on the sum of the batches' gradients.

        `record` measures the pipeline step of the last batch.

        Raises:
            PenstockError: on every rank, if the loss or the gradient norm is not finite; the weights stay as they were.
        """
        rate = learning_rate_at(number, self._options)
        loss, moments_s = self._accumulate(batches, record)
        recorded = self._gather(number, moments_s) if record else None
        require_finite("the loss", loss, number, rate)
        norm = clip_gradients(
            [(name, parameter.grad) for name, parameter in self.pipeline.named_parameters()],
            self.pipeline.transport.all_gather_object,
            self._options.clip_norm,
            skip=self.pipeline.copied_names,
        )
        require_finite("the gradient norm", norm, number, rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(loss, norm, rate, recorded)

    def _accumulate(self, batches: Batches, record: bool) -> tuple[float, list[float]]:
        """Return the sum of the losses, and when this rank was free for the last pipeline step, had its batch, and
        asked for the step."""
        total, device, read = 0.0, self.pipeline.device, self.pipeline.options.clock.read
        moments_s: list[float] = []
        for index in range(len(batches)):
            moments_s = [read()]
            tokens, target = batches[index]
            moments_s.append(read())
            tokens, target = tokens.to(device), target.to(device)
            moments_s.append(read())
            is_recorded = record and index == len(batches) - 1
            result = self.pipeline.step(tokens, target=target, record=is_recorded)
            assert result.loss is not None, "the pipeline has a loss"
            total += result.loss.item()
        return total, moments_s

    def _gather(self, number: int, moments_s: list[float]) -> RecordedStep:
        """Put the recorded step together with what each rank did before it; a collective."""
        recording = self.pipeline.recording
        assert recording is not None, "the last pipeline step was recorded"
        own = [recording.from_own_clock(moment_s) for moment_s in moments_s]
        everyone = cast(list[list[float]], self.pipeline.transport.all_gather_object(own))
        return RecordedStep(
            number,
            recording.timeline,
            recording.message_bytes,
            tuple(self.pipeline.layers_of_stage),
            tuple(self.pipeline.layer_weights),
            tuple(LeadIn(*moments) for moments in everyone),
        )


def require_finite(what: str, value: float, step: int, learning_rate: float) -> None:
    """Stop a run that has gone astray. Raises: PenstockError."""
    if not math.isfinite(value):
        raise PenstockError(
            f"step {step}: {what} is {value}; expected a finite number. The learning rate was {learning_rate:g}: lower "
            "optimizer.learning_rate, raise optimizer.warmup_steps, or lower optimizer.clip_norm (0 means no clipping)"
        )
