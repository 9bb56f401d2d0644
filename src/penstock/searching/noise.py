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
    """Its objective without noise; 0 for none."""
    family_mean_s: float


def shares_of(noise: object, costs: Costs, num_stages: int) -> NDArray[np.float64]:
    """[3, num_stages] the standard deviation of an action, as a share of its seconds. Raises: ConfigError."""
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
        (each.kind, each.stage): each.quartile_range_s / each.median_s / QUARTILES
        for each in costs.spreads
        if each.median_s > 0.0
    }
    if not shares:
        raise ConfigError("the costs have no measured spreads; give a share such as 0.03", key="noise")
    mean = float(np.mean(list(shares.values())))
    of_stage = [
        float(np.mean([share for (_, other), share in shares.items() if other == stage] or [mean]))
        for stage in range(num_stages)
    ]
    return np.array([[shares.get((kind, stage), of_stage[stage]) for stage in range(num_stages)] for kind in PLANES])


def perturbed(problem: Problem, shares: NDArray[np.float64], seed: int) -> list[Problem]:
    """Return the problem with other seconds, `NUM_DRAWS` times; equal seeds draw the same.

    Half of the draws are the others with the opposite sign: so the work is the same on average, and what the mean is
    above the costs is what waiting adds.
    """
    share_of_action = np.repeat(shares.reshape(-1), problem.num_microbatches)
    drawn = np.random.default_rng(seed).standard_normal((NUM_DRAWS // 2, problem.num_actions))
    draws = [*drawn, *-drawn]
    return [replace(problem, seconds=problem.seconds * np.maximum(1.0 + share_of_action * draw, 0.0)) for draw in draws]


def mean_s(problems: Sequence[Problem], sequence: Ints, *, by_span: bool) -> float:
    """Return the mean of the objective over perturbed problems."""
    runs = [run(problem, sequence) for problem in problems]
    return float(np.mean([each.objective_s(by_span=by_span) for each in runs]))
