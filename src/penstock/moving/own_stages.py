"""Pipelines of ranks that bring their own stages only: none has, or could build, the whole list of layers.

A stage of another rank is a `ForeignStage`, a layer that is never built here. So stages are named by their index on
every rank: parameter `weight` of stage 2 is `2.weight`, also in `tied`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, PartitionError, PenstockError
from penstock.execute.batch.agreement import agree_on_setup, digest
from penstock.execute.losses.loss import Loss
from penstock.execute.options import refuse_unknown, split_options
from penstock.execute.transport.protocol import Transport
from penstock.execute.world import default_transport
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from penstock.plan import resolve_schedule
from penstock.schedules import find_family, is_file_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ForeignStage:
    """Stands for a stage that another rank brings."""

    stage: int

    def __call__(self) -> nn.Module:
        raise PartitionError(
            f"stage {self.stage} is another rank's, so this rank cannot build it; bring the stages that the schedule "
            "places on this rank"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where a pipeline is to run, and what it was asked for beside its schedule."""

    group: dist.ProcessGroup | None
    transport: Transport
    options: Mapping[str, Any]
    """Those of `PipelineOptions`."""
    family_options: Mapping[str, Any]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, options: Mapping[str, Any]) -> "Site":
        """Take the wires that `options` name, or new ones; every rank of the group calls it."""
        own, family_options = split_options(options)
        transport = own.transport or default_transport(group, own.deadline_s)
        rest = {name: options[name] for name in options if name not in family_options and name != "transport"}
        return cls(group, transport, rest, family_options)

    def together(self, make: Callable[[], T]) -> T:
        """Return what `make` returns; every rank calls it, and if it fails on any, all ranks hear of it at once.

        Raises:
            PenstockError: the rank's own, else a ConfigError with that of the first rank that has one.
        """
        failure: PenstockError | None = None
        try:
            made = make()
        except PenstockError as error:
            failure = error
        texts = self.transport.all_gather_object("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise ConfigError(f"rank {rank}: {text}")
        return made

    def schedule(self, schedule: str | Path | Schedule, microbatches: int | None, stages_per_rank: int) -> Schedule:
        """Return the schedule for this many ranks, a file's or a given one's as it is.

        Raises:
            ConfigError: there is no such schedule, or it cannot run here.
        """
        is_name = isinstance(schedule, str) and not is_file_name(schedule)
        if is_name:
            refuse_unknown(self.family_options, str(schedule), find_family(str(schedule)).options)
        found = resolve_schedule(
            schedule,
            ranks=self.transport.num_ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank if is_name else None,
            options=self.family_options,
        )
        if len(found.placement.routes) > 1:
            raise ConfigError(
                f"{found.name} runs two copies of every stage, which ranks that bring their own stages do not have; "
                "use a schedule with one route, or give Pipeline the whole list of layers",
                key="schedule",
            )
        return found

    def pipeline(self, own: Mapping[int, nn.Module], schedule: Schedule, loss: Loss | None) -> Pipeline:
        """Make the pipeline of which this rank brings the stages `own`; every rank calls it.

        Raises:
            PartitionError: on every rank alike, if a rank brings other stages than the schedule places there.
        """
        _agree_on_owners(self.transport, own, schedule)
        layers = [own[stage] if stage in own else ForeignStage(stage) for stage in range(schedule.num_stages)]
        return Pipeline(layers, schedule, loss=loss, group=self.group, transport=self.transport, **self.options)


def _agree_on_owners(transport: Transport, own: Collection[int], schedule: Schedule) -> None:
    agree_on_setup(transport, {"the schedule": f"{schedule!r} #{digest(schedule.to_csv()):x}"})
    everyone = transport.all_gather_object(sorted(own))
    for rank, found in enumerate(everyone):
        expected = list(schedule.placement.stages_of_rank[rank])
        if found != expected:
            raise PartitionError(
                f"rank {rank} brings the stages {found}, but {schedule.name} with {schedule.num_stages} stages places "
                f"{expected} there; bring these (in all: {_drawn(schedule)}), or use another schedule"
            )


def _drawn(schedule: Schedule) -> str:
    return " | ".join(" ".join(map(str, stages)) for stages in schedule.placement.stages_of_rank)
