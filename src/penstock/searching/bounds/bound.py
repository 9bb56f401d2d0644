"""Seconds that no order can go below (`Bound`), and the times that they add up (`Route`, `RankStages`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.searching.problem import FORWARD, INPUT, WEIGHT, Problem

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of a step, or of a rank's span."""

    name: str
    rank: int | None
    """Whose work it counts; None for all."""
    terms: dict[str, float] = field(default_factory=dict)
    """In seconds; they add up to the bound."""

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {seconds:.6g} s" for name, seconds in self.terms.items())
        return f"{self.name}{'' if self.rank is None else f' of rank {self.rank}'}: {terms}"


class Route:
    """The least seconds of a microbatch on each stage of the one route, and of its way between them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.forward, self.input, self.weight = (
            problem.plane(problem.seconds, plane).min(axis=1) for plane in (FORWARD, INPUT, WEIGHT)
        )
        wire = [problem.plane(problem.wire_s, plane).min(axis=1) for plane in (FORWARD, INPUT)]
        lag = [problem.plane(problem.lag_s, plane).min(axis=1) for plane in (FORWARD, INPUT)]
        self.down = lag[0].copy()
        """[num_stages] from the end of the F before it to its own F."""
        self.down[1:] += wire[0][:-1]
        self.up = lag[1].copy()
        """[num_stages] from the end of the I behind it to its own I."""
        self.up[:-1] += wire[1][1:]
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[["Route", int], Made], rank: int) -> Made:
        """Return what a function finds for a rank; it is called only once."""
        if (make, rank) not in self._made:
            self._made[make, rank] = make(self, rank)
        found: Made = self._made[make, rank]
        return found

    def bound(self, name: str, rank: int, terms: dict[str, float]) -> Bound:
        """Return a bound of seconds that ranks are busy, from the first start on, which is behind a launch."""
        launch_s = self.problem.launch_s
        return Bound(name, rank, {**terms, "first launch": -launch_s} if launch_s else terms)

    def forwards_between(self, first: int, last: int) -> float:
        """From the start of the F of a stage to when that of a later one can start."""
        return float(self.forward[first:last].sum() + self.down[first + 1 : last + 1].sum())

    def inputs_between(self, first: int, last: int) -> float:
        """From the end of the I of a stage to the end of that of an earlier one."""
        return float(self.up[first:last].sum() + self.input[first:last].sum())

    def there_and_back(self, stage: int) -> float:
        """From the end of an F of a stage to when its I can begin: F and I of all stages behind it."""
        behind = slice(stage + 1, None)
        ways = self.down[behind].sum() + self.up[stage:-1].sum()
        return float(self.forward[behind].sum() + self.input[behind].sum() + ways)


@dataclass(frozen=True, slots=True)
class RankStages:
    """A rank's stages in the order of the route: the most seconds and the fewest bytes of any microbatch on each."""

    stages: tuple[int, ...]
    count: int
    """Of microbatches."""
    limit: int
    """In bytes."""
    activation: tuple[int, ...]
    context: tuple[int, ...]
    """The share of an activation that is left for W once I has run."""
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, route: Route, rank: int) -> "RankStages":
        """Read them from the problem."""
        problem = route.problem
        stages = list(problem.placement.stages_of_rank[rank])
        seconds = [problem.plane(problem.seconds, plane)[stages].max(axis=1) for plane in (FORWARD, INPUT, WEIGHT)]
        sizes = problem.plane(problem.taken_bytes, FORWARD)[stages], problem.plane(problem.freed_bytes, WEIGHT)[stages]
        activation, context = (tuple(each.min(axis=1).tolist()) for each in sizes)
        forward, inputs, weight = (tuple(each.tolist()) for each in seconds)
        limit = int(problem.limit[rank])
        return cls(tuple(stages), problem.num_microbatches, limit, activation, context, forward, inputs, weight)

    def room(self, place: int) -> int:
        """Bytes beside the activations of one microbatch on the first stages, up to that at a place."""
        return self.limit - sum(self.activation[: place + 1])

    def most_activations(self, place: int) -> int:
        """Of the first stages, up to that at a place."""
        return max(self.limit, 0) // min(self.activation[: place + 1])

    def all_of(self, places: Iterable[int]) -> float:
        """Seconds of F, I and W of one microbatch on stages."""
        return sum(self.forward[place] + self.input[place] + self.weight[place] for place in places)
