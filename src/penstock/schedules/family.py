"""A family of schedules: a name, its options and restrictions, and the function that orders the actions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.errors import ConfigError
from penstock.ir.recompute import with_recompute
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.options import COMMON, Option, Options
from penstock.schedules.phases import RankOrder


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that every family gets."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_slices: int


Generate = Callable[[Shape, Options], Schedule]
"""It refuses a shape or an option that the family cannot do with a `ConfigError`. `build` takes the forwards alone."""


def loop(shape: Shape) -> Placement:
    """Return stages on ranks in turn: a line where each rank has one stage."""
    style = "line" if shape.num_stages == shape.num_ranks else "loop"
    return Placement.loop(shape.num_ranks, shape.num_stages, style=style)


def require_even(name: str, shape: Shape, instead: str) -> None:
    """Refuse odd numbers for a family of two directions. Raises: ConfigError, which names a family to take instead."""
    if shape.num_ranks % 2:
        raise ConfigError(
            f"{name} folds two directions onto an even number of ranks, got {shape.num_ranks}; "
            f"use {shape.num_ranks + 1}, or {instead}",
            key="ranks",
        )
    if shape.num_microbatches % 2:
        raise ConfigError(
            f"{name} sends half of the microbatches each way, got {shape.num_microbatches}; "
            f"use {shape.num_microbatches + 1}",
            key="microbatches",
        )


def by_rank(
    name: str,
    order: Callable[[int, Shape, Options], RankOrder],
    placement_of: Callable[[Shape], Placement] = loop,
) -> Generate:
    """Return the generator of a family whose order is written for one rank: it calls `order` for each rank.

    A generator makes a `Schedule` from a shape (numbers of ranks, stages, microbatches and slices) and the options of
    the family. `placement_of` says which rank holds which stage. Where a placement has several routes through the
    stages, as a bidirectional one has, each route takes an equal part of the microbatches: the first route the first
    ones.
    """

    def generate(shape: Shape, options: Options) -> Schedule:
        orders = [order(rank, shape, options) for rank in range(shape.num_ranks)]
        placement = placement_of(shape)
        microbatch = np.arange(shape.num_microbatches)
        return Schedule.from_arrays(
            name,
            placement,
            [order.rows for order in orders],
            num_microbatches=shape.num_microbatches,
            num_slices=shape.num_slices,
            joined=np.concatenate([order.joined for order in orders]),
            route_of_microbatch=(microbatch * len(placement.routes) // shape.num_microbatches).astype(np.int8),
        )

    return generate


def with_common(schedule: Schedule, options: Options) -> Schedule:
    """Return a schedule as the options of every family want it."""
    recompute = options.word("recompute")
    if recompute == "false":
        return schedule
    num_activations = None if recompute == "true" else int(recompute)
    return replace(with_recompute(schedule, activations=num_activations), name=schedule.name)


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the registry."""

    name: str
    summary: str
    source: str
    """The paper or system that the order comes from."""
    placement: str
    restrictions: str
    bubble: str
    """Idle time as a formula in p ranks, m microbatches and the stage times F, B, W."""
    memory: str
    """Peak activations of rank s as a formula."""
    advice: str
    """One line: when to use it."""
    generate: Generate
    stages_per_rank: tuple[int, ...] = (1,)
    """The numbers of stages per rank that it takes; the first is the default."""
    stages_of_options: Callable[[Options], int] | None = None
    """Stages per rank where none are given, if options decide on them."""
    takes_slices: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    example: tuple[int, int] = (4, 6)
    """Numbers of ranks and microbatches with which the family is drawn."""

    @property
    def all_options(self) -> Mapping[str, Option]:
        """Its own options, and those of every family."""
        return {**self.options, **COMMON}

    def default_stages_per_rank(self, options: Options) -> int:
        """Return the stages per rank of a schedule for which none are given."""
        return self.stages_per_rank[0] if self.stages_of_options is None else self.stages_of_options(options)

    def read_options(self, values: Mapping[str, object]) -> Options:
        """Return the family's options with these values.

        Raises:
            ConfigError: for an unknown option, or a value that an option cannot have.
        """
        return Options.read(self.name, self.all_options, values)
