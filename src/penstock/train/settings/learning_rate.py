"""The learning rate of each optimizer step: a linear warm-up, then one of a few shapes.

cosine, linear   from the largest rate down to the last one at the run's last step
constant         the largest rate
wsd              warm-up, stable, decay: constant, then linearly down over the last steps
"""

import math
from collections.abc import Callable, Mapping

from penstock.errors import PenstockError
from penstock.train.settings.sections import OptimizerSection


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
    height = _SHAPES[options.learning_rate_schedule](step, options, num_steps)
    if height == 1:
        return options.learning_rate  # the sum below may miss it by rounding
    return options.learning_rate * (options.minimum_fraction + (1 - options.minimum_fraction) * height)


def decay_steps_of(options: OptimizerSection, num_steps: int) -> int:
    """Return over how many steps the rate of "wsd" decays."""
    return options.decay_steps or max(1, num_steps // 10)


def _progress(step: int, options: OptimizerSection, num_steps: int) -> float:
    """Return the share of the steps after the warm-up that is behind."""
    return 1.0 if step >= num_steps else (step - options.warmup_steps) / (num_steps - options.warmup_steps)


def _cosine(step: int, options: OptimizerSection, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(step, options, num_steps)))


def _linear(step: int, options: OptimizerSection, num_steps: int) -> float:
    return 1 - _progress(step, options, num_steps)


def _constant(step: int, options: OptimizerSection, num_steps: int) -> float:
    return 1.0


def _wsd(step: int, options: OptimizerSection, num_steps: int) -> float:
    left, decaying = max(0, num_steps - step), decay_steps_of(options, num_steps)
    return min(1.0, left / decaying)


_SHAPES: Mapping[str, Callable[[int, OptimizerSection, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
"""By name, the height above the floor after the warm-up, from 1 down to 0."""
