"""`RankStages`: what a rank runs and holds of its stages, as bounds count it."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.searching.bounds.bound import Route
from penstock.searching.problem import FORWARD, INPUT, WEIGHT


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
        sizes = problem.plane(problem.taken, FORWARD)[stages], problem.plane(problem.freed, WEIGHT)[stages]
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
