"""One optimizer step: gradients of some batches added up, clipped over all ranks, and applied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import PenstockError
from penstock.execute.loss import Loss
from penstock.pipeline import Pipeline
from penstock.train.data import Batch
from penstock.train.optim import OptimizerOptions, build_optimizer, clip_gradients, learning_rate_at


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step was like, on every rank alike."""

    loss: float
    """Sum of the pipeline's losses over the batches."""
    gradient_norm: float
    """Over all ranks, before clipping."""
    learning_rate: float


def loss_over(loss: Loss, num_batches: int) -> Loss:
    """Return the loss whose gradients, added over so many batches of equal size, are those of their mean."""
    if num_batches == 1:
        return loss

    def part_of_mean(output: object, target: object) -> Tensor:
        return loss(output, target) / num_batches

    return part_of_mean


class Trainer:
    """A pipeline with its optimizer; every rank holds one and calls it alike."""

    def __init__(self, pipeline: Pipeline, options: OptimizerOptions) -> None:
        self.pipeline = pipeline
        self._options = options
        self._optimizer = build_optimizer(pipeline.named_parameters(), options)

    def step(self, number: int, batches: Sequence[Batch], *, record: bool = False) -> StepOutcome:
        """Run optimizer step `number`, counted from 1, on the sum of the batches' gradients.

        `record` measures the pipeline step of the last batch.

        Raises:
            PenstockError: on every rank, if the loss or the gradient norm is not finite; the weights stay as they were.
        """
        rate = learning_rate_at(number, self._options)
        loss = self._accumulate(batches, record)
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
        return StepOutcome(loss, norm, rate)

    def _accumulate(self, batches: Sequence[Batch], record: bool) -> float:
        total, device = 0.0, self.pipeline.device
        for index, (tokens, target) in enumerate(batches, start=1):
            is_recorded = record and index == len(batches)
            result = self.pipeline.step(tokens.to(device), target=target.to(device), record=is_recorded)
            assert result.loss is not None, "the pipeline has a loss"
            total += result.loss.item()
        return total


def require_finite(what: str, value: float, step: int, learning_rate: float) -> None:
    """Stop a run that has gone astray. Raises: PenstockError."""
    if not math.isfinite(value):
        raise PenstockError(
            f"step {step}: {what} is {value}; expected a finite number. The learning rate was {learning_rate:g}: lower "
            "optimizer.learning_rate, raise optimizer.warmup_steps, or lower optimizer.clip_norm (0 means no clipping)"
        )
