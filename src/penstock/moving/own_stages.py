"""Pipelines of ranks that bring their own stages only: none has, or could build, the whole list of layers.

A stage of another rank is a `RemoteStage`, a layer that is never built here. So stages are named by their index on
every rank: parameter `weight` of stage 2 is `2.weight`, also in `tied`. With two routes, each rank brings a module for
every one of its stages, and both copies of part k of the model have the names of stage k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, PartitionError
from penstock.execute.arguments import GROUP
from penstock.execute.joining import Joined, join
from penstock.execute.losses.loss import Loss
from penstock.execute.options import refuse_unknown
from penstock.execute.stages.layers import Layer
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.moving.stage_agreement import agree_on_stages, parts_of_stages
from penstock.pipeline import Pipeline
from penstock.planning import resolve_plan
from penstock.schedules import find_family, is_family_name


@dataclass(frozen=True, slots=True, eq=False)
class RemoteStage:
    """Stands for a stage that another rank brings."""

    stage: int

    def __call__(self) -> nn.Module:
        raise PartitionError(
            f"stage {self.stage} is another rank's, so this rank cannot build it; bring the stages that the schedule "
            "places on this rank"
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwnStage:
    """Hands over what this rank brought; of a bare module, a second route on another thread would run a deep copy."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return self.module


@dataclass(frozen=True, slots=True, eq=False)
class LocalStages:
    """Where a pipeline is to run, and what it was asked for beside its schedule."""

    joined: Joined
    options: Mapping[str, Any]
    """Those of `PipelineOptions`, as they were given."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | int | None, options: Mapping[str, Any]) -> "LocalStages":
        """Take the transport that `options` name, or a new one; every rank of the group calls it.

        As for `Pipeline`, a whole number as `group` is an option of the schedule's family.
        """
        joined = join(None, group, options, [GROUP])
        taken = {"transport", *joined.family_options}
        return cls(joined, {name: options[name] for name in options if name not in taken})

    @property
    def transport(self) -> Transport:
        """The messages to and from the other ranks."""
        return self.joined.transport

    def schedule(
        self, schedule: str | Path | Schedule, microbatches: int | None, stages_per_rank: int | None
    ) -> Schedule:
        """Return the schedule for this many ranks, a file's or a given one's as it is.

        Raises:
            ConfigError: there is no such schedule, it cannot run here, or it is a program.
        """
        is_name = is_family_name(schedule)
        family_options = dict(self.joined.family_options)
        if is_name:
            refuse_unknown(family_options, str(schedule), find_family(str(schedule)).all_options)
            if self.options.get("slices") is not None:
                family_options["slices"] = self.options["slices"]
        plan = resolve_plan(
            schedule,
            ranks=self.transport.num_ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank if is_name else None,
            options=family_options,
        )
        if isinstance(plan, Program):
            problem = f"{plan.name} is a program with communication; expected a schedule of F, B, I and W"
            raise ConfigError(problem, key="schedule")
        return plan

    def stages_per_rank(self, schedule: str | Path | Schedule, num_parts: int) -> int | None:
        """Return how many stages a rank has of a model in so many parts; None where a family leaves no choice.

        Families of two routes hold each part twice.
        """
        per_rank = max(num_parts // self.transport.num_ranks, 1)
        taken = find_family(str(schedule)).stages_per_rank if is_family_name(schedule) else (0,)
        return per_rank if per_rank in taken or 0 in taken else None

    def pipeline(self, own: Mapping[int, nn.Module], schedule: Schedule, loss: Loss | None) -> Pipeline:
        """Make the pipeline of which this rank brings the stages `own`; every rank calls it.

        With two routes, what the two copies of a part start with are the first one's values.

        Raises:
            PartitionError: on every rank alike, if a rank brings other stages than the schedule places there, or if two
                copies of a part differ.
        """
        shared = agree_on_stages(self.transport, own, schedule)
        routes = schedule.placement.routes
        parts = parts_of_stages(schedule.placement)
        layers: list[Layer] = [RemoteStage(part) for part in range(len(routes[0]))]
        for stage, module in own.items():
            layers[parts[stage]] = module if len(routes) == 1 else OwnStage(module)
        options = dict(self.options)
        if shared:
            options["tied"] = [*options.get("tied", ()), *shared]
        group, transport = self.joined.process_group, self.transport
        return Pipeline(
            layers, schedule, loss=loss, group=group, ranks=transport.num_ranks, transport=transport, **options
        )


def require_parts(schedule: Schedule, num_parts: int, key: str) -> None:
    """Make sure that a schedule runs a model of so many parts.

    Raises:
        ConfigError: it runs another number.
    """
    length = len(schedule.placement.routes[0])
    if length != num_parts and num_parts % schedule.num_ranks:
        raise ConfigError(
            f"{num_parts} parts of the model do not divide over {schedule.num_ranks} ranks; give a multiple, or a "
            "schedule that says where each stage is",
            key=key,
        )
    if length != num_parts:
        raise ConfigError(
            f"{num_parts} parts of the model are given, but {schedule.name} on {schedule.num_ranks} ranks runs "
            f"{length} one after another; give {length}, or use another schedule",
            key=key,
        )
