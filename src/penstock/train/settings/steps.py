"""The arithmetic of each optimizer step: the batches that it adds up, and its learning rate.

The rate has a linear warm-up, then one of a few shapes:

cosine, linear   from the largest rate down to the last one at the run's last step
constant         the largest rate
wsd              warm-up, stable, decay: constant, then linearly down over the last steps
"""

import math
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.train.settings.sections import OptimizerSection


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batches of each optimizer step, by the step's number alone, so that a run that continues finds its place."""

    full: int
    """Number of batches of a step behind the ramp-up."""
    first: int = 1
    """Number of batches of the first step of a ramp-up."""
    ramp_steps: int = 0
    """Steps over which the number of batches grows; 0: it is `full` from the beginning."""

    @property
    def is_constant(self) -> bool:
        """Whether all steps add up equally many batches."""
        return self.ramp_steps == 0 or self.first == self.full

    def count(self, step: int) -> int:
        """Return the number of batches of an optimizer step, counted from 1."""
        if step > self.ramp_steps:
            return self.full
        return self.first + (self.full - self.first) * (step - 1) // self.ramp_steps

    def begin(self, step: int) -> int:
        """Return the first batch of an optimizer step; batches are counted from 0."""
        ramped = min(step - 1, self.ramp_steps)
        return sum(map(self.count, range(1, ramped + 1))) + (step - 1 - ramped) * self.full


def learning_rate_at(step: int, options: OptimizerSection, num_steps: int) -> float:
    """Return the learning rate of a step, counted from 1.

    Where the rate decays, its floor is reached at `num_steps` and held after it.

    Raises:
        PenstockError: a step below 1.
    """
    if step < 1:
        raise PenstockError(f"step {step} has no learning rate; steps are counted from 1")
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    height = _height(step, options, num_steps)
    if height == 1:
        return options.learning_rate  # the sum below may miss it by rounding
    return options.learning_rate * (options.minimum_fraction + (1 - options.minimum_fraction) * height)


def decay_steps_of(options: OptimizerSection, num_steps: int) -> int:
    """Return over how many steps the rate of "wsd" decays."""
    return options.decay_steps or max(1, num_steps // 10)


def _height(step: int, options: OptimizerSection, num_steps: int) -> float:
    """Return the height of the rate above its floor after the warm-up, from 1 down to 0."""
    warmup_steps = options.warmup_steps
    progress = 1.0 if step >= num_steps else (step - warmup_steps) / (num_steps - warmup_steps)
    match options.learning_rate_schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case "constant":
            return 1.0
        case "wsd":
            return min(1.0, max(0, num_steps - step) / decay_steps_of(options, num_steps))
