"""Bounds by how long a rank must idle before an action, behind another one, and in rounds between.

    rank    F F F ~ ~ ~ ~ I ...        fill: before its first I it can run only the F that the limit holds
            ... F I W I W ~ ~ ~ I W    drain: behind its last F only the I and W of what fits beside its activation

docs/searching.md has the proofs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from penstock.searching.bounds.bound import Bound, RankStages, Route
from penstock.searching.bounds.busiest import work_of
from penstock.searching.bounds.knapsack import Kinds, most_seconds
from penstock.searching.bounds.rounds import Rounds, rounds_of


@dataclass(frozen=True, slots=True)
class Phase:
    """The time until an action starts (a fill), or from when the last one of its kind ends (a drain)."""

    is_input: bool
    """Whether this is an I of a stage, rather than an F."""
    place: int
    """Of the stage on its rank."""
    idle_s: float
    """That the rank idles at least; below 0 where it has more to do than there is time."""
    busy_s: float
    """That it works at most."""
    rounds_s: float = 0.0
    """That it idles besides in rounds, where the action is not the first of its kind."""

    @property
    def all_idle_s(self) -> float:
        return self.idle_s + self.rounds_s


NOTHING = Phase(False, 0, 0.0, 0.0)


def of_fill_and_drain(route: Route) -> Iterator[Bound]:
    """A rank's span."""
    for rank in range(route.problem.num_ranks):
        yield route.once(_fill_and_drain, rank)


def of_begin_fill_and_drain(route: Route) -> Iterator[Bound]:
    """A step: what comes before the first F of the rank is added."""
    for rank, bound in enumerate(of_fill_and_drain(route)):
        begin = route.forwards_between(0, route.problem.placement.stages_of_rank[rank][0])
        yield Bound(f"begin, {bound.name}", rank, {"begin": begin, **bound.terms})


def of_fill_and_end(route: Route) -> Iterator[Bound]:
    """A step, and the span of the first stage's rank, in which another rank's first F lies, and the end of its last I.

    So what comes before the rank's first F is added, and what comes behind its last I.
    """
    for rank, stages in enumerate(route.problem.placement.stages_of_rank):
        if stages[0] != 0:
            drains = list(_drains(route, route.once(RankStages.of, rank), to_end=True))
            begin = route.forwards_between(0, stages[0])
            terms = {"begin": begin, **_most_idle(route, rank, drains, "end")}
            yield route.bound("fill and end", rank, terms)


def _fill_and_drain(route: Route, rank: int) -> Bound:
    drains = [NOTHING, *_drains(route, route.once(RankStages.of, rank), to_end=False)]
    return route.bound("fill and drain", rank, _most_idle(route, rank, drains, "drain"))


def _most_idle(route: Route, rank: int, drains: list[Phase], name: str) -> dict[str, float]:
    """Return the terms of the fill and the drain that are apart and idle most."""
    own, work = route.once(RankStages.of, rank), work_of(route.problem, rank)
    pairs = product([NOTHING, *route.once(_fills, rank)], drains)
    apart = [pair for pair in pairs if _are_apart(own, *pair, work)]
    fill, drain = max(apart, key=lambda pair: pair[0].all_idle_s + pair[1].idle_s)
    rounds = {"rounds": fill.rounds_s} if fill.rounds_s else {}
    return {"work": work, "fill": fill.idle_s, **rounds, name: drain.idle_s}


def _are_apart(own: RankStages, fill: Phase, drain: Phase, work: float) -> bool:
    """Whether the fill is over before the drain begins, in every order."""
    if NOTHING in (fill, drain) or fill.busy_s + drain.busy_s < work * (1 - 1e-12):
        return True  # not all work can be before the one and behind the other
    if fill.rounds_s:
        return False
    if fill.is_input and not drain.is_input:  # else all activations would be there when the last F runs
        return own.count * sum(own.activation[: fill.place + 1]) > own.limit
    return drain.place <= fill.place if fill.is_input else True


def _fills(route: Route, rank: int) -> list[Phase]:
    own = route.once(RankStages.of, rank)
    found: list[Phase] = []
    for place in range(len(own.stages)):
        found += _fills_of(route, own, place, own.count - 1)
        rounds = rounds_of(route, own, place)
        if rounds is not None:
            found += _fills_with_rounds(route, own, place, rounds)
    return found


def _fills_with_rounds(route: Route, own: RankStages, place: int, rounds: Rounds) -> Iterator[Phase]:
    """Until one of the last F or I of a stage; behind earlier ones, there are only fewer rounds."""
    waits = (rounds.start_s - rounds.busy_s).tolist()
    for index in range(max(1, own.count - 1 - own.most_activations(place)), own.count):
        for fill in _fills_of(route, own, place, own.count - 1 - index) if waits[index] > 0 else ():
            busy = fill.busy_s + float(rounds.busy_s[index])
            yield Phase(fill.is_input, place, fill.idle_s, busy, waits[index])


def _fills_of(route: Route, own: RankStages, place: int, others: int) -> Iterator[Phase]:
    """Until the first F and the first I of a stage, with so many other microbatches of which work can come before."""
    stage, before, behind = own.stages[place], own.stages[:place], own.stages[place + 1 :]
    forwards: Kinds = [(own.activation[each], own.forward[each], others) for each in range(place)]
    way = route.forwards_between(own.stages[0], stage) - sum(float(route.forward[each]) for each in before)
    busy = most_seconds(forwards, own.room(place))
    yield Phase(False, place, way - busy, busy + sum(own.forward[:place]))
    # A microbatch whose activation is there may have run on all stages behind.
    all_behind = own.all_of(range(place + 1, len(own.stages)))
    forwards.append((own.activation[place], own.forward[place] + all_behind, others))
    way += route.there_and_back(stage) - sum(float(route.forward[each] + route.input[each]) for each in behind)
    busy = most_seconds(forwards, own.room(place))
    idle = way - sum(own.weight[place + 1 :]) - busy
    yield Phase(True, place, idle, busy + sum(own.forward[: place + 1]) + all_behind)


def _drains(route: Route, own: RankStages, *, to_end: bool) -> Iterator[Phase]:
    """From the last I of each stage, and the last F of the last stage: to the end of the rank, or of stage 0."""
    first, places = own.stages[0], range(len(own.stages))
    end = route.inputs_between(0, first) + float(route.weight[0]) - own.weight[0] if to_end else 0.0
    weights: Kinds = [(own.context[each], own.weight[each], own.count - 1) for each in places]
    both: Kinds = [(own.activation[each], own.input[each] + own.weight[each], own.count - 1) for each in places]
    for place, stage in enumerate(own.stages):
        way = route.inputs_between(first, stage) - sum(float(route.input[each]) for each in own.stages[:place])
        idle = way + end - sum(own.weight[1 : place + 1])
        known = sum(own.weight[: place + 1]) + sum(own.input[:place])
        late: Kinds = [(size, seconds, own.count) for size, seconds, _ in weights[place + 1 :]]
        busy = most_seconds([*weights[: place + 1], *late, *both[:place]], own.room(place))
        yield Phase(True, place, idle - busy, busy + known)
    # From the last F on: `idle` and `known` are those of the last stage.
    busy = most_seconds([*weights, *both], own.room(places[-1]))
    idle = route.there_and_back(own.stages[-1]) - busy + (idle if to_end else max(idle, 0.0))
    yield Phase(False, places[-1], idle, busy + known + own.input[-1])
