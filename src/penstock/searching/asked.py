"""What a search is asked for: placements by name, and the problem of each under a limit of memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described, nearest
from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.searching.problem import Problem
from penstock.simulation.costs.costs import COMPUTE_FIELDS, Costs

PLACEMENTS = ("line", "loop", "v", "wave")
ANY = "any"
_WANTED = {"line": "one stage a rank", "v": "two", "loop": "as many on each rank", "wave": "an even number a rank"}


def require_choice(key: str, given: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices. Raises: ConfigError."""
    if given not in choices:
        near = nearest(str(given), choices) if isinstance(given, str) else ""
        raise ConfigError(f"{described(given)}; expected one of {', '.join(choices)}.{near}", key=key)


def require_number(key: str, given: object, *, at_least: int, is_whole: bool = True) -> None:
    """Refuse what is no number, or a smaller one. Raises: ConfigError."""
    is_number = isinstance(given, int if is_whole else (int, float)) and not isinstance(given, bool)
    if not is_number or not float(str(given)) >= at_least:
        what = "a whole number" if is_whole else "a number"
        raise ConfigError(f"{described(given)}; expected {what}, {at_least} or larger", key=key)


def problems_of(
    costs: Costs, ranks: int, microbatches: int, placement: str, stages_per_rank: int | None, memory_limit: Any
) -> Iterator[Problem]:
    """Yield the problem of each placement that was asked for and can be had."""
    require_choice("placement", placement, (*PLACEMENTS, ANY))
    limit = None if memory_limit is None else Limit.read(memory_limit)
    refused: ConfigError | None = None
    placed: list[Placement] = []
    for name in PLACEMENTS if placement == ANY else (placement,):
        try:
            found = _place(name, ranks, _num_stages(costs, ranks, name, stages_per_rank))
        except ConfigError as error:
            refused = refused or error
            continue
        if found not in placed:
            placed.append(found)
            yield _problem(found, microbatches, costs, limit)
    if not placed and refused is not None:
        raise refused


def _num_stages(costs: Costs, ranks: int, placement: str, stages_per_rank: int | None) -> int:
    longest = max(len(getattr(costs, name)) for name in COMPUTE_FIELDS)
    if stages_per_rank is None and longest > 1:
        return longest
    default = 1 if placement == "line" else 2
    return ranks * (default if stages_per_rank is None else stages_per_rank)


def _place(name: str, ranks: int, num_stages: int) -> Placement:
    per_rank, rest = divmod(num_stages, ranks)
    allowed = {
        "line": per_rank == 1,
        "v": per_rank == 2,
        "loop": per_rank >= 1,
        "wave": per_rank >= 2 and not per_rank % 2,
    }
    if rest or not allowed[name]:
        wanted = {
            "line": "one stage a rank",
            "v": "two",
            "loop": "as many on each rank",
            "wave": "an even number a rank",
        }
        raise ConfigError(
            f"{name} takes {wanted[name]}, got {num_stages} stages on {ranks} ranks; give costs for other stages, or "
            "another placement",
            key="placement",
        )
    if name == "v":
        return Placement.vee(ranks)
    if name == "wave":
        return Placement.wave(ranks, num_stages)
    return Placement.line(ranks) if name == "line" else Placement.loop(ranks, num_stages)


def _problem(placement: Placement, microbatches: int, costs: Costs, limit: Limit | None) -> Problem:
    if limit is None:
        return Problem.of(placement, microbatches, costs)
    limit.require_sizes(costs.activation_bytes)
    amounts = limit.of_ranks(placement.num_ranks, placement.stages_per_rank)
    if limit.in_bytes:
        amounts = amounts - costs.stage_bytes(placement, microbatches).static_of_ranks(placement)
    return Problem.of(placement, microbatches, costs, amounts, counts=not limit.in_bytes)


def cheapest(problem: Problem, costs: Costs) -> Problem:
    """Return a problem whose actions take the least that any order could pay for them.

    A whole backward may take less than its parts, an overlapped pair less than both actions, and a forward less than
    one that prepares a split backward.
    """
    seconds = problem.seconds.copy()
    size = len(seconds) // 3
    factors = np.tile(costs.per_microbatch("microbatch_compute_factor", problem.num_microbatches), problem.num_stages)

    def of_actions(name: str) -> NDArray[np.float64]:
        per_stage = np.array(costs.per_stage(name, problem.num_stages))
        return np.asarray(np.repeat(per_stage, problem.num_microbatches) * factors + costs.launch_s)

    if costs.split_forward_s:
        seconds[:size] = np.minimum(seconds[:size], of_actions("forward_s"))
    if costs.backward_s:
        whole = of_actions("backward_s")
        inputs, weights = seconds[size : 2 * size], seconds[2 * size :]
        inputs[:] = np.minimum(inputs, whole)
        weights[:] = np.minimum(weights, whole - inputs)
    elif costs.launch_s:
        seconds[2 * size :] = np.maximum(seconds[2 * size :] - costs.launch_s, 0.0)  # one launch for a whole backward
    return replace(problem, seconds=seconds * min(costs.overlap_factor, 1.0))
