"""Which rank holds which stage, and the routes of stages that microbatches travel."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from penstock.errors import ScheduleError, shortened

STYLES = ("line", "loop", "wave", "v", "bidirectional", "explicit")
"""Names of placements."""


@dataclass(frozen=True)
class Placement:
    """Stages on ranks.

    `rank_of_stage[stage]` is the rank that holds the stage; each rank holds at least one. `routes` lists, per route,
    the stages that a microbatch visits in order; every stage lies on exactly one route. One route 0..S-1 is the
    ordinary case; bidirectional schedules have two, over two copies of the model.
    """

    style: str = field(compare=False)
    """The name of the placement; on one rank, or where a wave has one turn, several names fit."""
    rank_of_stage: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = set(self.rank_of_stage)
        if not ranks or ranks != set(range(len(ranks))):
            raise ScheduleError(
                f"placement {shortened(self.rank_of_stage)}: every rank from 0 to the largest must hold a stage; "
                "number the ranks 0, 1, ... without gaps"
            )
        if () in self.routes:
            raise ScheduleError(
                f"routes {shortened(self.routes)}: route {self.routes.index(())} has no stages, so nothing would "
                "compute its microbatches; drop it, or give it stages"
            )
        visited = sorted(stage for route in self.routes for stage in route)
        if visited != list(range(self.num_stages)):
            raise ScheduleError(
                f"routes {shortened(self.routes)}: each of the stages 0..{self.num_stages - 1} must lie on exactly "
                "one route"
            )

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def stages_per_rank(self) -> Fraction:
        """How many stages of a rank a microbatch visits, in the mean: one where each rank has one stage."""
        return Fraction(max(len(route) for route in self.routes), self.num_ranks)

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        stages_of_rank: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of_stage):
            stages_of_rank[rank].append(stage)
        return tuple(map(tuple, stages_of_rank))

    @cached_property
    def previous_stage(self) -> tuple[int, ...]:
        """The stage before each stage on its route; -1 where a route begins."""
        previous_of = {next_stage: stage for route in self.routes for stage, next_stage in pairwise(route)}
        return tuple(previous_of.get(stage, -1) for stage in range(self.num_stages))

    @cached_property
    def next_stage(self) -> tuple[int, ...]:
        """The stage after each stage on its route; -1 where a route ends."""
        next_of = {stage: next_stage for route in self.routes for stage, next_stage in pairwise(route)}
        return tuple(next_of.get(stage, -1) for stage in range(self.num_stages))

    @cached_property
    def route_of_stage(self) -> tuple[int, ...]:
        """The index of each stage's route."""
        route_of = {stage: index for index, route in enumerate(self.routes) for stage in route}
        return tuple(route_of[stage] for stage in range(self.num_stages))

    @classmethod
    def line(cls, num_ranks: int) -> "Placement":
        """Stage s on rank s.

        For 4 ranks: 0 | 1 | 2 | 3
        """
        return cls.loop(num_ranks, num_ranks, style="line")

    @classmethod
    def loop(cls, num_ranks: int, num_stages: int, *, style: str = "loop") -> "Placement":
        """Stage s on rank s mod p (Megatron-LM's interleaving, arXiv 2104.04473).

        For 4 ranks and 8 stages: 0 4 | 1 5 | 2 6 | 3 7
        """
        return cls(style, tuple(stage % num_ranks for stage in range(num_stages)), (tuple(range(num_stages)),))

    @classmethod
    def wave(cls, num_ranks: int, num_stages: int, *, style: str = "wave") -> "Placement":
        """Stages down the ranks and up again, so that neighbours meet at each turn (Hanayo, arXiv 2308.15762).

        For 4 ranks and 16 stages: 0 7 8 15 | 1 6 9 14 | 2 5 10 13 | 3 4 11 12
        """
        last = 2 * num_ranks - 1
        there_and_back = [min(step, last - step) for step in range(2 * num_ranks)]
        ranks = tuple(there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages))
        return cls(style, ranks, (tuple(range(num_stages)),))

    @classmethod
    def vee(cls, num_ranks: int) -> "Placement":
        """Stages r and 2p-1-r on rank r, so that first and last stage meet (ZB-V, arXiv 2401.10241, section 6).

        For 4 ranks: 0 7 | 1 6 | 2 5 | 3 4
        """
        return cls.wave(num_ranks, 2 * num_ranks, style="v")

    @classmethod
    def bidirectional(cls, num_ranks: int) -> "Placement":
        """Two copies of a model of p stages, the second from the last rank to the first (Chimera, arXiv 2107.06925).

        For 4 ranks: 0 7 | 1 6 | 2 5 | 3 4, with the routes 0 1 2 3 and 4 5 6 7
        """
        first_copy = tuple(range(num_ranks))
        second_copy = tuple(range(num_ranks, 2 * num_ranks))
        return cls("bidirectional", first_copy + first_copy[::-1], (first_copy, second_copy))

    @classmethod
    def explicit(cls, rank_of_stage: Sequence[int], routes: Sequence[Sequence[int]] | None = None) -> "Placement":
        """Take the ranks as given; without `routes`, one route through all stages in order."""
        all_routes = [range(len(rank_of_stage))] if routes is None else routes
        return cls("explicit", tuple(rank_of_stage), tuple(tuple(route) for route in all_routes))


def modules_of_ranks(placement: Placement) -> list[list[int]]:
    """Return the stages, together with their copies on the same rank, which are one module; mostly one stage each."""
    modules: dict[tuple[int, int], list[int]] = {}
    for route in placement.routes:
        for part, stage in enumerate(route):
            modules.setdefault((placement.rank_of_stage[stage], part), []).append(stage)
    return list(modules.values())


def stages_without_copies(placement: Placement) -> list[int]:
    """Return of the copies of a stage on one rank the last one."""
    return [stages[-1] for stages in modules_of_ranks(placement)]
