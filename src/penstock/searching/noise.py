"""Noise of the costs: what a candidate takes on average where every action takes a little more or less than said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.searching.problem import PLANES, Ints, Problem
from penstock.searching.sequences import run
from penstock.simulation.costs.costs import Costs

NUM_DRAWS = 16
"""Perturbed costs over which the mean is taken."""
QUARTILES = 1.349
"""The width of the middle half of a normal distribution, in its standard deviations."""
Measured = Literal["measured"]


@dataclass(frozen=True, slots=True)
class NoiseEffect:
    """The mean of the objective over perturbed costs, of the result and of the best family."""

    mean_s: float
    family: str
    """The family that is best without noise; empty where none fits."""
    family_s: float
    """The objective of the family without noise; 0 where none fits."""
    family_mean_s: float
    """The mean of the objective of the family; 0 where none fits."""


def shares_of(noise: object, costs: Costs, num_stages: int) -> NDArray[np.float64]:
    """Return the standard deviation of actions as a share of their seconds, [3, num_stages]. Raises: ConfigError."""
    if noise == "measured":
        return _measured(costs, num_stages)
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0.0 <= noise < 1.0:
        raise ConfigError(
            f"{described(noise)}; expected a share of an action's seconds such as 0.03, below 1, or 'measured'",
            key="noise",
        )
    return np.full((len(PLANES), num_stages), float(noise))


def _measured(costs: Costs, num_stages: int) -> NDArray[np.float64]:
    shares = {
        (spread.kind, spread.stage): spread.quartile_range_s / spread.median_s / QUARTILES
        for spread in costs.spreads
        if spread.median_s > 0.0
    }
    if not shares:
        raise ConfigError("the costs have no measured spreads; give a share such as 0.03", key="noise")
    mean = float(np.mean(list(shares.values())))
    table = np.empty((len(PLANES), num_stages))
    for stage in range(num_stages):
        shares_of_stage = [share for (_, measured_stage), share in shares.items() if measured_stage == stage]
        mean_of_stage = float(np.mean(shares_of_stage or [mean]))
        table[:, stage] = [shares.get((kind, stage), mean_of_stage) for kind in PLANES]
    return table


def perturbed(problem: Problem, shares: NDArray[np.float64], seed: int) -> list[Problem]:
    """Return the problem with other seconds, `NUM_DRAWS` times; equal seeds draw the same.

    Half of the draws are the opposites of the other half. So the work is the same on average, and the mean is above the
    costs by what waiting adds.
    """
    share_of_action = np.repeat(shares.reshape(-1), problem.num_microbatches)
    half = np.random.default_rng(seed).standard_normal((NUM_DRAWS // 2, problem.num_actions))
    draws = [*half, *-half]
    return [replace(problem, seconds=problem.seconds * np.maximum(1.0 + share_of_action * draw, 0.0)) for draw in draws]


def mean_s(problems: Sequence[Problem], sequence: Ints, *, by_span: bool) -> float:
    """Return the mean of the objective over perturbed problems."""
    return float(np.mean([run(problem, sequence).objective_s(by_span=by_span) for problem in problems]))
