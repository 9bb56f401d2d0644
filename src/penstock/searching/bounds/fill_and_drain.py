"""The bound by how long a rank must idle at the begin and at the end of a step under its limit of memory.

    rank    F F F ~ ~ ~ ~ I ...        fill: before its first I it can run only the F that the limit holds
            ... F I W I W ~ ~ ~ I W    drain: behind its last F only the I and W of what fits beside its activation

docs/search.md has the proof.
"""

from collections.abc import Iterator, Sequence

from penstock.searching.bounds.bound import Bound, Route
from penstock.searching.bounds.busiest import work_of
from penstock.searching.problem import FORWARD, INPUT, NO_LIMIT, WEIGHT


def of_fill_and_drain(route: Route) -> Iterator[Bound]:
    """A rank's span under its limit."""
    for rank in range(route.problem.num_ranks):
        bound = _fill_and_drain(route, rank)
        if bound is not None:
            yield bound


def of_begin_fill_and_drain(route: Route) -> Iterator[Bound]:
    """A step under the limit of a rank: what comes before its first F is added."""
    for bound in of_fill_and_drain(route):
        first = route.problem.placement.stages_of_rank[bound.rank][0]
        yield Bound(f"begin, {bound.name}", bound.rank, {"begin": route.forwards_before(first), **bound.terms})


def _fill_and_drain(route: Route, rank: int) -> Bound | None:
    problem = route.problem
    limit = int(problem.limit[rank])
    if limit == NO_LIMIT:
        return None
    stages = problem.placement.stages_of_rank[rank]
    first, last = stages[0], stages[-1]
    activation = [_smallest(problem.plane(problem.taken, FORWARD)[stage]) for stage in stages]
    context = [_smallest(problem.plane(problem.freed, WEIGHT)[stage]) for stage in stages]
    forward, both, weight = (
        [float(problem.plane(problem.seconds, plane)[stage].max()) for stage in stages]
        for plane in (FORWARD, INPUT, WEIGHT)
    )
    both = [one + other for one, other in zip(both, weight, strict=True)]
    count = problem.num_microbatches
    to_first_input = route.there_and_back(last) + _from_first_to_last(route, first, last)
    fill = max(to_first_input - most_seconds(activation, forward, count, limit), 0.0)
    room = limit - activation[-1]
    held = most_seconds([*activation, *context], [*both, *weight], count, room)
    drain = max(route.there_and_back(last) - held, 0.0)
    has_both = sum(activation) * count > limit
    idle = {"fill": fill, "drain": drain} if has_both else {"fill or drain": max(fill, drain)}
    return route.bound("fill and drain", rank, {"work": work_of(problem, rank), **idle})


def _from_first_to_last(route: Route, first: int, last: int) -> float:
    """From the start of a rank's first F to the end of its last one, of the same microbatch."""
    return float(route.forward[first : last + 1].sum() + route.down[first + 1 : last + 1].sum())


def _smallest(sizes: Sequence[int]) -> int:
    return int(min(sizes))


def most_seconds(sizes: Sequence[int], seconds: Sequence[float], count: int, room: int) -> float:
    """Return at least the most seconds of items that fit into a room; there are `count` of each kind.

    Of one kind, or of kinds of one size, it is exact: whole items are counted. Otherwise the last item is cut.
    """
    total, left = 0.0, room
    is_exact = len({size for size, each in zip(sizes, seconds, strict=True) if each > 0}) == 1
    kinds = [(size, each) for size, each in zip(sizes, seconds, strict=True) if each > 0]
    # What takes no room comes first; then what has most seconds for its room.
    for size, each in sorted(kinds, key=lambda kind: kind[1] / kind[0] if kind[0] else float("inf"), reverse=True):
        if left < 0:
            break
        if size == 0:
            total += count * each
            continue
        number = min(count, left // size if is_exact else left / size)
        total += number * each
        left -= int(number * size)
    return total
