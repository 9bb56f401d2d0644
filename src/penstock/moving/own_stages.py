"""Pipelines of ranks that bring their own stages only: none has, or could build, the whole list of layers.

A stage of another rank is a `RemoteStage`, a layer that is never built here. So stages are named by their index on
every rank: parameter `weight` of stage 2 is `2.weight`, also in `tied`. With two routes, each rank brings a module for
every one of its stages, and both copies of part k of the model have the names of stage k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, PartitionError, described
from penstock.execute.joining import Joined, join
from penstock.execute.losses.loss import Loss
from penstock.execute.options import refuse_unknown
from penstock.execute.replicas.mesh import MESH
from penstock.execute.stages.layers import Layer
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.moving.schedule_classes import schedule_of_class
from penstock.moving.stage_agreement import agree_on_stages, parts_of_stages
from penstock.pipeline import Pipeline
from penstock.planning import DEFAULT_MICROBATCHES, resolve_plan
from penstock.schedules import find_family, is_family_name

AnySchedule = str | Path | Schedule | type[Any]
"""What an adapter takes for a schedule: a name, a file, a table, or a class for DeepSpeed or torch."""


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
class LocalStage:
    """Stands for a stage that this rank brings; of a bare module, a second route on another thread would run a copy."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return self.module


@dataclass(frozen=True, slots=True, eq=False)
class PipelineMaker:
    """Makes a pipeline of the stages that the ranks of a group bring."""

    joined: Joined
    """The group and the transport of the ranks, and the options that belong to the schedule's family."""
    options: Mapping[str, Any]
    """The options of `PipelineOptions`, as the caller passed them."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, options: Mapping[str, Any]) -> "PipelineMaker":
        """Connect to the ranks of the group, or of the transport or mesh of `options`; every rank calls it."""
        joined = join(group, {name: options[name] for name in options if name != MESH}, mesh=options.get(MESH))
        joined_options = {"transport", MESH, *joined.family_options}
        return cls(joined, {name: options[name] for name in options if name not in joined_options})

    @property
    def connection(self) -> dict[str, Any]:
        """The keyword by which a pipeline takes over the connection to the other ranks."""
        return {MESH: self.joined.places} if self.joined.has_mesh else {"transport": self.transport}

    @property
    def transport(self) -> Transport:
        """The messages to and from the other ranks of this rank's pipeline."""
        return self.joined.transport

    def schedule(self, schedule: AnySchedule, microbatches: int | None, stages_per_rank: int | None) -> Schedule:
        """Return the schedule that a name, a file or a class says, or a `Schedule` as it is, for the group's ranks.

        `microbatches` is the number of microbatches of a batch; `stages_per_rank` counts for names and classes alone.

        Raises:
            ConfigError: there is no such schedule, it cannot run here, or it is a program.
        """
        if isinstance(schedule, type):
            schedule = self._schedule_of_class(schedule, microbatches, stages_per_rank)
        if not isinstance(schedule, (str, PathLike, Schedule, Program)):
            raise ConfigError(
                f"{described(schedule)}; expected a name, a Schedule, the path of a file, or a class, not an object of "
                "one",
                key="schedule",
            )
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

    def _schedule_of_class(
        self, schedule: type[Any], microbatches: int | None, stages_per_rank: int | None
    ) -> Schedule:
        if self.options.get("slices") not in (None, 1):
            raise ConfigError(
                f"{self.options['slices']}, but {schedule.__name__} is a class that runs whole microbatches; leave it "
                "out, or give a schedule with slices by name",
                key="slices",
            )
        return schedule_of_class(
            schedule,
            ranks=self.transport.num_ranks,
            microbatches=DEFAULT_MICROBATCHES if microbatches is None else microbatches,
            stages_per_rank=stages_per_rank,
        )

    def stages_per_rank(self, schedule: AnySchedule, num_parts: int) -> int | None:
        """Return how many stages a rank has of a model in so many parts; None where a family leaves no choice.

        Families of two routes hold each part twice, and leave no choice.
        """
        even_number = max(num_parts // self.transport.num_ranks, 1)
        allowed_numbers = find_family(str(schedule)).stages_per_rank if is_family_name(schedule) else (0,)
        return even_number if even_number in allowed_numbers or 0 in allowed_numbers else None

    def pipeline(self, modules: Mapping[int, nn.Module], schedule: Schedule, loss: Loss | None) -> Pipeline:
        """Make the pipeline to which this rank brings `modules`, by their stage; every rank calls it.

        The stages of other ranks are stand-ins. With two routes through the model, as in a bidirectional schedule, two
        stages hold copies of a part of the model, which start with the values of the first one.

        Raises:
            PartitionError: on every rank alike, if a rank brings other stages than the schedule places there, or if two
                copies of a part differ.
        """
        # Ties are parameters that two stages of a rank share: all ranks must know them.
        ties = agree_on_stages(self.joined.places, modules, schedule)
        routes = schedule.placement.routes
        part_of_stage = parts_of_stages(schedule.placement)
        layers: list[Layer] = [RemoteStage(part) for part in range(len(routes[0]))]
        for stage, module in modules.items():
            layers[part_of_stage[stage]] = module if len(routes) == 1 else LocalStage(module)
        options = dict(self.options)
        if ties:
            options["tied"] = [*options.get("tied", ()), *ties]
        return Pipeline(
            layers,
            schedule,
            loss=loss,
            process_group=None if self.joined.has_mesh else self.joined.process_group,
            ranks=self.transport.num_ranks,
            **self.connection,
            **options,
        )


def require_parts(schedule: Schedule, num_parts: int, key: str) -> None:
    """Make sure that a schedule runs a model of so many parts. Raises: ConfigError, if it runs another number."""
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
