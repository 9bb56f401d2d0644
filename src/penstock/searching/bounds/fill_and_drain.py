"""Bounds by how long a rank must idle before an action, behind another one, and in rounds between.

    rank    F F F ~ ~ ~ ~ I ...        fill: before its first I it can run only the F that the limit holds
            ... F I W I W ~ ~ ~ I W    drain: behind its last F only the I and W of what fits beside its activation

docs/searching.md has the proofs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from penstock.searching.bounds.bound import Bound, RankCosts, Route
from penstock.searching.bounds.busiest import work_of
from penstock.searching.bounds.knapsack import Kinds, most_seconds
from penstock.searching.bounds.rounds import Rounds, rounds_of


@dataclass(frozen=True, slots=True)
class Phase:
    """The time until an action starts (a fill), or from when the last one of its kind ends (a drain)."""

    is_input: bool
    """Whether the action is an I of a stage rather than an F."""
    place: int
    """The index of the stage among the stages of its rank."""
    idle_s: float
    """The least seconds that the rank idles; below 0 where it has more to do than there is time."""
    busy_s: float
    """The most seconds that the rank works."""
    rounds_s: float = 0.0
    """The seconds that the rank idles besides in rounds, where the action is not the first of its kind."""


NOTHING = Phase(False, 0, 0.0, 0.0)


def of_fill_and_drain(route: Route) -> Iterator[Bound]:
    """Yield a bound of each rank's span: its work, a fill and a drain."""
    for rank in range(route.problem.num_ranks):
        yield route.once(_fill_and_drain, rank)


def of_begin_fill_and_drain(route: Route) -> Iterator[Bound]:
    """Yield a bound of a step per rank, to which what comes before the rank's first F is added."""
    for rank, bound in enumerate(of_fill_and_drain(route)):
        begin = route.forwards_between(0, route.problem.placement.stages_of_rank[rank][0])
        yield Bound(f"begin, {bound.name}", rank, {"begin": begin, **bound.terms})


def of_fill_and_end(route: Route) -> Iterator[Bound]:
    """Yield bounds of a step, and of the span of the first stage's rank.

    Another rank's first F lies in this span, and so does the end of its last I. So what comes before the first F is
    added, and what comes behind the last I.
    """
    for rank, stages in enumerate(route.problem.placement.stages_of_rank):
        if stages[0] != 0:
            drains = list(_drains(route, route.once(RankCosts.of, rank), to_end=True))
            begin = route.forwards_between(0, stages[0])
            terms = {"begin": begin, **_most_idle(route, rank, drains, "end")}
            yield route.bound("fill and end", rank, terms)


def _fill_and_drain(route: Route, rank: int) -> Bound:
    drains = [NOTHING, *_drains(route, route.once(RankCosts.of, rank), to_end=False)]
    return route.bound("fill and drain", rank, _most_idle(route, rank, drains, "drain"))


def _most_idle(route: Route, rank: int, drains: list[Phase], name: str) -> dict[str, float]:
    """Return the terms of the fill and the drain that do not overlap and idle most; `name` is the term of the drain."""
    costs, work = route.once(RankCosts.of, rank), work_of(route.problem, rank)
    pairs = product([NOTHING, *route.once(_fills, rank)], drains)
    disjoint_pairs = [pair for pair in pairs if _are_disjoint(costs, *pair, work)]
    fill, drain = max(disjoint_pairs, key=lambda pair: pair[0].idle_s + pair[0].rounds_s + pair[1].idle_s)
    rounds = {"rounds": fill.rounds_s} if fill.rounds_s else {}
    return {"work": work, "fill": fill.idle_s, **rounds, name: drain.idle_s}


def _are_disjoint(costs: RankCosts, fill: Phase, drain: Phase, work: float) -> bool:
    """Whether the fill is over before the drain begins, in every order."""
    if NOTHING in (fill, drain) or fill.busy_s + drain.busy_s < work * (1 - 1e-12):
        return True  # not all work can run in the fill and the drain
    if fill.rounds_s:
        return False
    if fill.is_input and not drain.is_input:  # all activations would be there when the last F runs
        return costs.num_microbatches * sum(costs.activation[: fill.place + 1]) > costs.limit
    return drain.place <= fill.place if fill.is_input else True


def _fills(route: Route, rank: int) -> list[Phase]:
    costs = route.once(RankCosts.of, rank)
    fills: list[Phase] = []
    for place in range(len(costs.stages)):
        fills += _fills_of(route, costs, place, costs.num_microbatches - 1)
        rounds = rounds_of(route, costs, place)
        if rounds is not None:
            fills += _fills_with_rounds(route, costs, place, rounds)
    return fills


def _fills_with_rounds(route: Route, costs: RankCosts, place: int, rounds: Rounds) -> Iterator[Phase]:
    """Yield the fills until each of the last F and I of a stage; until earlier ones, there are only fewer rounds."""
    rounds_s = (rounds.start_s - rounds.busy_s).tolist()
    for index in range(max(1, costs.num_microbatches - 1 - costs.most_activations(place)), costs.num_microbatches):
        for fill in _fills_of(route, costs, place, costs.num_microbatches - 1 - index) if rounds_s[index] > 0 else ():
            busy_s = fill.busy_s + float(rounds.busy_s[index])
            yield Phase(fill.is_input, place, fill.idle_s, busy_s, rounds_s[index])


def _fills_of(route: Route, costs: RankCosts, place: int, num_others: int) -> Iterator[Phase]:
    """Yield the fills until the first F and I of a stage; work of `num_others` other microbatches can come before."""
    stage, earlier, later = costs.stages[place], list(costs.stages[:place]), list(costs.stages[place + 1 :])
    forwards: Kinds = [(costs.activation[index], costs.forward[index], num_others) for index in range(place)]
    way_s = route.forwards_between(costs.stages[0], stage) - sum(route.forward[earlier].tolist())
    busy_s = most_seconds(forwards, costs.room(place))
    yield Phase(False, place, way_s - busy_s, busy_s + sum(costs.forward[:place]))
    # A microbatch whose activation is there may have run on all later stages.
    all_later_s = costs.all_of(range(place + 1, len(costs.stages)))
    forwards.append((costs.activation[place], costs.forward[place] + all_later_s, num_others))
    way_s += route.there_and_back(stage) - sum((route.forward[later] + route.input[later]).tolist())
    busy_s = most_seconds(forwards, costs.room(place))
    idle_s = way_s - sum(costs.weight[place + 1 :]) - busy_s
    yield Phase(True, place, idle_s, busy_s + sum(costs.forward[: place + 1]) + all_later_s)


def _drains(route: Route, costs: RankCosts, *, to_end: bool) -> Iterator[Phase]:
    """Yield the drains from the last I of each stage, and from the last F of the last stage.

    They end with the rank's last action, or with `to_end` at the end of stage 0.
    """
    first, num_others = costs.stages[0], costs.num_microbatches - 1
    end_s = route.inputs_between(0, first) + float(route.weight[0]) - costs.weight[0] if to_end else 0.0
    weights: Kinds = [(size, weight_s, num_others) for size, weight_s in zip(costs.context, costs.weight, strict=True)]
    backwards: Kinds = [
        (size, input_s + weight_s, num_others)
        for size, input_s, weight_s in zip(costs.activation, costs.input, costs.weight, strict=True)
    ]
    for place, stage in enumerate(costs.stages):
        way_s = route.inputs_between(first, stage) - sum(route.input[list(costs.stages[:place])].tolist())
        idle_s = way_s + end_s - sum(costs.weight[1 : place + 1])
        last_s = sum(costs.weight[: place + 1]) + sum(costs.input[:place])  # the last microbatch's own work
        later: Kinds = [(size, seconds, costs.num_microbatches) for size, seconds, _ in weights[place + 1 :]]
        busy_s = most_seconds([*weights[: place + 1], *later, *backwards[:place]], costs.room(place))
        yield Phase(True, place, idle_s - busy_s, busy_s + last_s)
    # From the last F on: `idle_s` and `last_s` are those of the last stage.
    busy_s = most_seconds([*weights, *backwards], costs.room(place))
    idle_s = route.there_and_back(costs.stages[-1]) - busy_s + (idle_s if to_end else max(idle_s, 0.0))
    yield Phase(False, place, idle_s, busy_s + last_s + costs.input[-1])
