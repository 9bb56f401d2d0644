"""Seconds that no order can go below (`Bound`), and the times that they add up (`Route`, `RankCosts`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.searching.problem import FORWARD, INPUT, NO_LIMIT, WEIGHT, Problem

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of the seconds of a step, or of a rank's span."""

    name: str
    rank: int | None
    """The rank whose work it counts; None for all ranks."""
    terms: dict[str, float] = field(default_factory=dict)
    """The seconds that add up to the bound, by name."""

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
        """[num_stages] seconds from the end of a microbatch's F on the stage before to the start of its F."""
        self.down[1:] += wire[0][:-1]
        self.up = lag[1].copy()
        """[num_stages] seconds from the end of a microbatch's I on the next stage to the start of its I."""
        self.up[:-1] += wire[1][1:]
        self._results: dict[Any, Any] = {}

    def once(self, function: Callable[["Route", int], Result], rank: int) -> Result:
        """Return the result of a function for a rank; the function is called only once."""
        if (function, rank) not in self._results:
            self._results[function, rank] = function(self, rank)
        result: Result = self._results[function, rank]
        return result

    def bound(self, name: str, rank: int, terms: dict[str, float]) -> Bound:
        """Return a bound of seconds that ranks are busy, from the first start on, which is behind a launch."""
        launch_s = self.problem.launch_s
        return Bound(name, rank, {**terms, "first launch": -launch_s} if launch_s else terms)

    def forwards_between(self, first: int, last: int) -> float:
        """Return the seconds from the start of the F of a stage to when that of a later one can start."""
        return float(self.forward[first:last].sum() + self.down[first + 1 : last + 1].sum())

    def inputs_between(self, first: int, last: int) -> float:
        """Return the seconds from the end of the I of a later stage to the end of that of an earlier one."""
        return float(self.up[first:last].sum() + self.input[first:last].sum())

    def there_and_back(self, stage: int) -> float:
        """Return the seconds from the end of an F of a stage to when its I can begin: F and I of all later stages."""
        later = slice(stage + 1, None)
        ways = self.down[later].sum() + self.up[stage:-1].sum()
        return float(self.forward[later].sum() + self.input[later].sum() + ways)


@dataclass(frozen=True, slots=True)
class RankCosts:
    """The most seconds and the fewest bytes of any microbatch on each stage of a rank, in the order of the route."""

    stages: tuple[int, ...]
    num_microbatches: int
    limit: int
    """The bytes that the rank may hold beside the workspace of an F or I that runs, which is the smallest of the rank.

    Each bound counts what is held while an F or I of the rank runs.
    """
    activation: tuple[int, ...]
    """Bytes of an activation on each stage."""
    context: tuple[int, ...]
    """Bytes of an activation that stay for W once I has run, on each stage."""
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, route: Route, rank: int) -> "RankCosts":
        """Return what the problem says of a rank."""
        problem = route.problem
        stages = list(problem.placement.stages_of_rank[rank])
        seconds = [problem.plane(problem.seconds, plane)[stages].max(axis=1) for plane in (FORWARD, INPUT, WEIGHT)]
        kept_bytes = problem.taken_bytes - problem.freed_bytes
        sizes = problem.plane(kept_bytes, FORWARD)[stages], problem.plane(-kept_bytes, WEIGHT)[stages]
        activation, context = (tuple(size.min(axis=1).tolist()) for size in sizes)
        forward, inputs, weight = (tuple(plane.tolist()) for plane in seconds)
        workspaces = (
            problem.plane(problem.freed_bytes, FORWARD)[stages],
            problem.plane(problem.taken_bytes, INPUT)[stages],
        )
        limit = int(problem.limit[rank])
        if limit != NO_LIMIT:
            limit -= int(min(workspace.min() for workspace in workspaces))
        return cls(tuple(stages), problem.num_microbatches, limit, activation, context, forward, inputs, weight)

    def room(self, place: int) -> int:
        """Return the bytes beside one microbatch's activations on the rank's first stages, up to that at a place."""
        return self.limit - sum(self.activation[: place + 1])

    def most_activations(self, place: int) -> int:
        """Return how many activations of the rank's first stages, up to that at a place, it can hold."""
        return max(self.limit, 0) // min(self.activation[: place + 1])

    def all_of(self, places: Iterable[int]) -> float:
        """Return the seconds of F, I and W of one microbatch on the stages at these places."""
        return sum(self.forward[place] + self.input[place] + self.weight[place] for place in places)
