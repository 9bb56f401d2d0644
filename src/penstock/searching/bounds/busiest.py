"""Bounds by the work of one rank or of one microbatch, whatever memory there is (docs/searching.md has the proofs)."""

from collections.abc import Iterator

from penstock.searching.bounds.bound import Bound, Route
from penstock.searching.problem import FORWARD, INPUT, WEIGHT, Problem


def of_work(route: Route) -> Iterator[Bound]:
    """Yield a bound of each rank's span: all that it computes."""
    for rank in range(route.problem.num_ranks):
        yield route.bound("work", rank, {"work": work_of(route.problem, rank)})


def of_begin_and_work(route: Route) -> Iterator[Bound]:
    """Yield a bound of a step per rank, which begins when a microbatch has come, and then does all its work."""
    for rank, stages in enumerate(route.problem.placement.stages_of_rank):
        begin = route.forwards_between(0, stages[0])
        yield route.bound("begin and work", rank, {"begin": begin, "work": work_of(route.problem, rank)})


def of_inputs_and_end(route: Route) -> Iterator[Bound]:
    """Yield bounds of a step, and of the span of the first stage's rank.

    When the last I of a rank ends, it has run all its F and I; its W may come later. Behind this I come those of the
    stages before it.
    """
    problem = route.problem
    for rank, stages in enumerate(problem.placement.stages_of_rank):
        first = stages[0]
        yield route.bound(
            "inputs and end",
            rank,
            {
                "begin": route.forwards_between(0, first),
                "F and I": work_of(problem, rank) - work_of(problem, rank, WEIGHT),
                "end": route.inputs_between(0, first) + float(route.weight[0]),
            },
        )


def of_slowest_microbatch(route: Route) -> Iterator[Bound]:
    """Yield a bound of a step, and of the span of the first stage's rank: one microbatch on all stages and back."""
    problem = route.problem
    forward, inputs, weight = (problem.plane(problem.seconds, plane) for plane in (FORWARD, INPUT, WEIGHT))
    seconds = forward.sum(axis=0) + inputs.sum(axis=0) + weight[0]
    slowest = int(seconds.argmax())
    terms = {"F and I": float(seconds[slowest] - weight[0, slowest]), "W": float(weight[0, slowest])}
    ways = float(route.down[1:].sum() + route.up[:-1].sum())
    yield route.bound(f"microbatch {slowest}", problem.placement.rank_of_stage[0], {**terms, "ways": ways})


def work_of(problem: Problem, rank: int, *planes: int) -> float:
    stages = list(problem.placement.stages_of_rank[rank])
    chosen = planes or (FORWARD, INPUT, WEIGHT)
    return float(sum(problem.plane(problem.seconds, plane)[stages].sum() for plane in chosen))
