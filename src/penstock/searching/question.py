"""The questions of a search: placements by name, and the problem of one under a limit of memory."""

from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, PartitionError, described, require_choice
from penstock.ir.live import StageBytes, one_each
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.planning import equal_work_costs
from penstock.proofs import Limit
from penstock.searching.problem import Bytes, Problem, every_action
from penstock.simulation.costs.costs import COMPUTE_FIELDS, STATIC_BYTES, VALUE_BYTES, Costs
from penstock.simulation.costs.layer_costs import LayerCosts

PLACEMENTS = ("line", "loop", "v", "wave")
ANY = "any"
_STAGES = {"line": "one stage a rank", "v": "two", "loop": "as many on each rank", "wave": "an even number a rank"}


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a search of one placement, beside its problem and its time."""

    costs: Costs
    """What one action of each stage of the placement costs."""
    by_span: bool
    memory_limit: Any
    noise_shares: NDArray[np.float64] | None
    seed: int


def require_number(key: str, value: object, *, at_least: int, is_whole: bool = True) -> None:
    """Refuse a value that is no number, or a smaller one. Raises: ConfigError."""
    kind = Integral if is_whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not float(value) >= at_least:
        expected = "a whole number" if is_whole else "a number"
        raise ConfigError(f"{described(value)}; expected {expected}, {at_least} or larger", key=key)


def problems_of(
    costs: Costs | LayerCosts,
    ranks: int,
    microbatches: int,
    placement: str,
    stages_per_rank: int | None,
    memory_limit: Any = None,
    *,
    per_action: bool = False,
) -> list[tuple[Problem, Costs]]:
    """Return what is to be ordered on each placement that can have such costs, and the costs of its stages.

    `placement` is a name, or `any` for all that are known; a placement says which rank holds which stage. A
    `memory_limit` is one text or number for all ranks, or one per rank. With `per_action`, costs are of single actions,
    and not of all that a rank does for a microbatch.

    Raises:
        ConfigError, PartitionError: no placement can have these costs, with the first one's reason; or a wrong limit.
    """
    require_choice("placement", placement, (*PLACEMENTS, ANY))
    refusals: list[ConfigError | PartitionError] = []
    problems: dict[Placement, tuple[Problem, Costs]] = {}
    for name in PLACEMENTS if placement == ANY else (placement,):
        try:
            num_stages = _num_stages_of(costs, ranks, name, stages_per_rank, per_action=per_action)
            table = every_action(place(name, ranks, num_stages), microbatches)
            stage_costs = equal_work_costs(costs, table, per_action=per_action)
            problem = limited_problem(table.placement, microbatches, stage_costs, memory_limit)
        except (ConfigError, PartitionError) as error:
            refusals.append(error)
        else:
            problems.setdefault(table.placement, (problem, stage_costs))
    if not problems:
        raise refusals[0]
    return list(problems.values())


def _num_stages_of(
    costs: Costs | LayerCosts, ranks: int, placement: str, stages_per_rank: int | None, *, per_action: bool
) -> int:
    """Return how many stages there are: those asked for, those that costs have entries for, or those of a placement.

    One entry is for all ranks, and as many as ranks are one for each: neither says how many stages a rank has. Costs of
    single actions have an entry per stage.
    """
    if stages_per_rank is not None:
        return ranks * stages_per_rank
    if isinstance(costs, Costs):
        longest = max(len(getattr(costs, name)) for name in (*COMPUTE_FIELDS, *VALUE_BYTES, *STATIC_BYTES))
        if longest > 1 and (per_action or longest != ranks):
            return longest
    return ranks * (1 if placement == "line" else 2)


def place(name: str, ranks: int, num_stages: int) -> Placement:
    """Return a placement by its name. Raises: ConfigError, where it cannot have so many stages."""
    per_rank, rest = divmod(num_stages, ranks)
    is_allowed = {"line": per_rank == 1, "v": per_rank == 2, "loop": True, "wave": not per_rank % 2}
    if rest or not per_rank or not is_allowed[name]:
        raise ConfigError(
            f"{name} takes {_STAGES[name]}, got {num_stages} stages on {ranks} ranks; give costs for other stages, or "
            "another placement",
            key="placement",
        )
    if name == "v":
        return Placement.vee(ranks)
    if name == "wave":
        return Placement.wave(ranks, num_stages)
    return Placement.line(ranks) if name == "line" else Placement.loop(ranks, num_stages)


def limited_problem(placement: Placement, microbatches: int, costs: Costs, memory_limit: Any) -> Problem:
    """Return the problem of a placement whose stages cost so much, under a limit of memory or none.

    Raises:
        ConfigError: for a value that is no limit, and for a limit in bytes where the costs know no bytes.
    """
    limit = None if memory_limit is None else Limit.read(memory_limit)
    problem = Problem.of(placement, microbatches, costs, counts=limit is not None and not limit.in_bytes)
    if limit is None:
        return problem
    limit.require_sizes(costs.activation_bytes)
    _, most_bytes = sizes_and_limit(every_action(placement, microbatches), costs, limit)
    return replace(problem, limit=most_bytes)


def sizes_and_limit(table: Schedule | Program, costs: Costs, limit: Limit) -> tuple[StageBytes, Bytes]:
    """Return the sizes that a limit counts, and [num_ranks] how much a rank may hold beside what is always there."""
    most_bytes = limit.of_ranks(table.num_ranks, table.parts_per_rank)
    if not limit.in_bytes:
        return one_each(table), most_bytes
    sizes = costs.stage_bytes(table.placement, table.num_microbatches)
    return sizes, most_bytes - sizes.static_of_ranks(table.placement)


def cheapest(problem: Problem, costs: Costs) -> Problem:
    """Return a problem whose actions take the least that any order could pay for them.

    A whole backward may take less than its parts, an overlapped pair less than both actions, and a forward less than
    one that prepares a split backward.
    """
    seconds = problem.seconds.copy()
    forwards, inputs, weights = np.split(seconds, 3)  # views
    factors = np.tile(costs.per_microbatch("microbatch_compute_factor", problem.num_microbatches), problem.num_stages)

    def of_actions(name: str) -> NDArray[np.float64]:
        per_stage = np.array(costs.per_stage(name, problem.num_stages))
        return np.asarray(np.repeat(per_stage, problem.num_microbatches) * factors + costs.launch_s)

    if costs.split_forward_s:
        forwards[:] = np.minimum(forwards, of_actions("forward_s"))
    if costs.backward_s:
        whole_backwards = of_actions("backward_s")
        inputs[:] = np.minimum(inputs, whole_backwards)
        weights[:] = np.minimum(weights, whole_backwards - inputs)
    elif costs.launch_s:
        weights[:] = np.maximum(weights - costs.launch_s, 0.0)  # a whole backward has one launch
    return replace(problem, seconds=seconds * min(costs.overlap_factor, 1.0))
