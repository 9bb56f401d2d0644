"""The best family of a layout that fits, with layers split by their seconds, or by memory where that does not fit.

Every family that has one route is simulated without its messages first, which takes a tenth of the time of a plan. Then
the shortest are planned in turn, until those that are left take longer than the best plan even without messages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.live import peak_bytes
from penstock.ir.operations import Op
from penstock.ir.recompute import with_recompute
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.partition.balance import balance
from penstock.partition.split import split_over
from penstock.placement import Placement
from penstock.searching.candidates import families_of
from penstock.searching.fitting import FittingSplit, fitting_split
from penstock.searching.layouts.planned import PlannedLayout, planned
from penstock.searching.layouts.problem import LayoutProblem
from penstock.searching.split_orders import one_at_a_time
from penstock.simulation.engine import simulate

MOST_LEAST = 2
"""The most families that are split by memory where nothing fits, those of least memory first."""
MOST_STAGES_RESPLIT = 16
"""The most stages of a schedule that is split by memory: with several on a rank, splits are tried one by one."""
MOST_RESPLIT = 4
"""The most schedules that are split by memory, the fastest first; where none of them fits, `MOST_LEAST` follow."""


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A schedule with a split, and what it comes to without messages and gathers."""

    schedule: Schedule
    split: tuple[int, ...]
    makespan_s: float
    peak_bytes: int
    """The most that a rank holds."""
    mean_bytes: float
    """The mean over the ranks of the most that each holds."""


def best_of_families(problem: LayoutProblem, below_s: float = math.inf) -> PlannedLayout | None:
    """Return the fastest plan of a family that fits and takes less than so long; None where none was found."""
    if least_kept_bytes(problem) > problem.limit_bytes:
        return None
    drafts = sorted(_drafts(problem), key=_by_makespan)
    drafts = [draft for draft in drafts if draft.makespan_s < below_s]
    best = _fastest(problem, [draft for draft in drafts if draft.peak_bytes <= problem.limit_bytes])
    if best is not None:
        return best
    # A split moves bytes from rank to rank, and hardly changes their mean.
    small = [
        draft
        for draft in drafts
        if draft.schedule.num_stages <= MOST_STAGES_RESPLIT and draft.mean_bytes <= problem.limit_bytes
    ]
    least = sorted(small[MOST_RESPLIT:], key=lambda draft: draft.mean_bytes)[:MOST_LEAST]
    return _fastest(problem, _resplit(problem, small[:MOST_RESPLIT])) or _fastest(problem, _resplit(problem, least))


def least_kept_bytes(problem: LayoutProblem) -> float:
    """Return the mean bytes of a rank where nothing runs again: less than the fullest rank holds, in any order.

    When the last layer has run its first F, no backward has run, so each layer still holds what that microbatch left.
    """
    always = problem.of_layers("activation_bytes") + np.array(problem.resident_costs.optimizer_bytes)
    return float(always.sum()) / problem.layout.pipeline


def best_of_savers(problem: LayoutProblem, below_s: float = math.inf) -> PlannedLayout | None:
    """Return the fastest plan that fits of those that need little memory; None where none does.

    It is for models none of whose layouts fit with a family whose forwards run once.
    """
    plans = [plan for plan in _savers(problem, least=False) if plan.peak_bytes <= problem.limit_bytes]
    best = min(plans, key=lambda plan: plan.step_s, default=None)
    return best if best is not None and best.step_s < below_s else None


def least_plans(problem: LayoutProblem) -> Iterator[PlannedLayout]:
    """Yield the plans of which one needs least memory, whether they fit or not."""
    return _savers(problem, least=True)


def _savers(problem: LayoutProblem, *, least: bool) -> Iterator[PlannedLayout]:
    """Yield plans that need little memory: families, and one microbatch at a time, whose forwards run once or again.

    Layers are split by memory: those with `least` so that the fullest rank holds least, others to be fast and fit.
    """
    drafts = sorted(_drafts(problem), key=lambda draft: draft.peak_bytes)[:MOST_LEAST]
    once = {draft.schedule.name: draft.schedule for draft in drafts}
    alone = [one_at_a_time(placement, problem.layout.microbatches) for placement in placements_of(problem)]
    again = [with_recompute(schedule) for schedule in (*alone, *once.values())]
    for family, schedule in (*once.items(), *(("", schedule) for schedule in (*alone, *again))):
        try:
            splits = _splits_of(problem, schedule)
            split = splits.least if least else splits.split
            if split is not None:
                yield planned(problem, schedule, split, family)
        except (ConfigError, ScheduleError):  # overlapped pairs need more stages whole at once
            continue


def placements_of(problem: LayoutProblem) -> list[Placement]:
    """Return the placements that a layout may have: a line, loops and waves."""
    ranks = problem.layout.pipeline
    placements: list[Placement] = []
    for number in problem.layout.stages_per_rank(problem.num_layers):
        placements.append(Placement.loop(ranks, ranks * number))
        if number % 2 == 0 and ranks > 1:
            placements.append(Placement.wave(ranks, ranks * number))
    return placements


def balanced_split(problem: LayoutProblem, placement: Placement) -> tuple[int, ...]:
    """Return the layers of each stage of which the heaviest takes least."""
    return balance(problem.seconds.tolist(), placement.num_stages)


def _drafts(problem: LayoutProblem) -> Iterator[_Draft]:
    splits_backwards = bool(problem.costs.backward_input and problem.costs.backward_weight)
    for schedule in families_of(placements_of(problem), problem.layout.microbatches):
        if Op.BACKWARD_INPUT in schedule.ops and not splits_backwards:
            continue
        split = balanced_split(problem, schedule.placement)
        yield _draft(problem, schedule, split)


def _draft(problem: LayoutProblem, schedule: Schedule, split: tuple[int, ...]) -> _Draft:
    layers = split_over(schedule.placement, problem.num_layers, split=split)
    costs = problem.resident_costs.of_table(schedule, layers)
    sizes = costs.stage_bytes(schedule.placement, schedule.num_microbatches)
    held = sizes.static_of_ranks(schedule.placement) + np.array(peak_bytes(schedule, sizes))
    makespan_s = simulate(schedule, costs, compiled=True).makespan_s
    return _Draft(schedule, split, makespan_s, int(held.max()), float(held.mean()))


def _fastest(problem: LayoutProblem, drafts: list[_Draft]) -> PlannedLayout | None:
    """Return the fastest plan that fits; drafts are those with the shortest makespans first."""
    best: PlannedLayout | None = None
    for draft in drafts:
        if best is not None and draft.makespan_s >= best.step_s:
            break
        try:
            candidate = planned(problem, draft.schedule, draft.split, draft.schedule.name)
        except (ConfigError, ScheduleError):
            continue
        if candidate.peak_bytes <= problem.limit_bytes and (best is None or candidate.step_s < best.step_s):
            best = candidate
    return best


def _by_makespan(draft: _Draft) -> float:
    return draft.makespan_s


def _resplit(problem: LayoutProblem, drafts: list[_Draft]) -> list[_Draft]:
    """Return schedules with a split in which no rank holds more than it may, those that have one, fastest first."""
    fitting = []
    for draft in drafts:
        try:
            split = _splits_of(problem, draft.schedule).split
        except ConfigError:
            continue
        if split is not None:
            fitting.append(_draft(problem, draft.schedule, split))
    return sorted(fitting, key=_by_makespan)


def _splits_of(problem: LayoutProblem, schedule: Schedule) -> FittingSplit:
    """Return the splits of a schedule that matter for the memory of the layout. Raises: ConfigError, as `lower`."""
    program = lower(schedule, shard=problem.sharding.shard, residency=problem.sharding.residency)
    return fitting_split(problem.costs, program, np.full(program.num_ranks, problem.limit_bytes), problem.shards)
