"""`PlannedLayout`: a schedule of a layout, proved, lowered and simulated with its gathers, reductions and update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.operations import Op
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.planning import Plan, plan
from penstock.searching.layouts.layout import Layout
from penstock.searching.layouts.problem import LayoutProblem
from penstock.simulation.costs.costs import Costs


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLayout:
    """A layout with a split and a schedule that fits, and what is predicted of it."""

    layout: Layout
    plan: Plan
    """The proved schedule and program, and the predicted timeline of a step."""
    costs: Costs
    """The costs of its stages, with which it was simulated."""
    split: tuple[int, ...]
    """The layers of each stage."""
    family: str = ""
    """The family of the schedule, with its defaults; empty where it is none."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def schedule_name(self) -> str:
        """The family, or what has made the schedule and on which placement; `num_recomputed` says what runs again."""
        made_by = self.schedule.name.partition(" (")[0]  # without how, as in "searched (improved)"
        return self.family or f"{made_by} {self.schedule.placement.style}"

    @property
    def num_recomputed(self) -> int:
        """Stages whose forwards run again."""
        return len(np.unique(self.schedule.stage[self.schedule.op == Op.RECOMPUTE]))

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def step_s(self) -> float:
        """Seconds of a step, with gathers, reductions and the update of the weights."""
        return self.plan.timeline.step_s

    @property
    def rank_bytes(self) -> list[int]:
        """The most bytes that each rank holds."""
        timeline = self.plan.timeline
        return [peak + static for peak, static in zip(timeline.peak_bytes, timeline.static_bytes, strict=True)]

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def fullest_rank(self) -> int:
        return self.rank_bytes.index(self.peak_bytes)


def planned(problem: LayoutProblem, schedule: Schedule, split: Sequence[int], family: str = "") -> PlannedLayout:
    """Prove a schedule of a layout, lower it and simulate it with these layers per stage; the limit is not looked at.

    Raises:
        ScheduleError: a proof fails.
        ConfigError: the layout cannot gather its stages, as where overlapped pairs need more whole at once.
    """
    layers = split_over(schedule.placement, problem.num_layers, split=split)
    costs = problem.stage_costs(layers, schedule)
    sharding = problem.sharding
    options: dict[str, Any] = {"shard": sharding.shard, "residency": sharding.residency}
    proved = plan(schedule, costs, optimizer_step=True, **options)
    return PlannedLayout(problem.layout, proved, costs, tuple(split), family)
