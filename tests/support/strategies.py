"""The hypothesis vocabulary: shapes and schedules of the registry, placements, and random orders that can run."""

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules import FAMILIES, Choice, build


@st.composite
def shapes(draw, max_ranks=4, max_microbatches=8):
    """Arguments of `build` for some family, which may refuse them."""
    family = draw(st.sampled_from(list(FAMILIES.values())))
    per_rank = draw(st.sampled_from([None, *(count or 3 for count in family.stages_per_rank)]))
    return {
        "name": family.name,
        "ranks": draw(st.integers(1, max_ranks)),
        "microbatches": draw(st.integers(1, max_microbatches)),
        "stages_per_rank": per_rank,
        "slices": draw(st.integers(1, 3)) if family.takes_slices else 1,
        "forward_only": draw(st.booleans()),
        **draw(options_of(family)),
    }


def options_of(family):
    """Values for some of a family's options."""
    values = {
        name: st.sampled_from(option.choices) if isinstance(option, Choice) else st.integers(1, 6)
        for name, option in family.options.items()
    }
    return st.fixed_dictionaries({}, optional=values)


@st.composite
def schedules(draw, **limits):
    """Schedules of the registry, of shapes that their families do not refuse."""
    try:
        return build(**draw(shapes(**limits)))
    except ConfigError:
        reject()


@st.composite
def placements(draw):
    """Lines, loops, Vs, bidirectional and arbitrary placements on at most 4 ranks."""
    num_ranks = draw(st.integers(1, 4))
    style = draw(st.sampled_from(["line", "loop", "v", "bidirectional", "explicit"]))
    if style == "line":
        return Placement.line(num_ranks)
    if style == "loop":
        return Placement.loop(num_ranks, num_ranks + draw(st.integers(0, 4)))
    if style == "v":
        return Placement.vee(num_ranks)
    if style == "bidirectional" and num_ranks > 1:
        return Placement.bidirectional(num_ranks)
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))
    return Placement.explicit(draw(st.permutations([*range(num_ranks), *more])))


def one_of_each_rank(placement, stages):
    """The first of these stages on each rank: only such can be tied."""
    first = {placement.rank_of_stage[stage]: stage for stage in sorted(stages, reverse=True)}
    return sorted(first.values())


def ends(schedule):
    """The first and the last stage, or the first alone where they are on one rank."""
    return one_of_each_rank(schedule.placement, (0, schedule.num_stages - 1))


def needs(action, schedule):
    """The actions, on whatever rank, that must have run before; as the design words it, apart from `ir/deps.py`."""
    kind, stage, microbatch, part = action.kind, action.stage, action.microbatch, action.slice
    placement = schedule.placement
    if kind is Kind.BACKWARD_WEIGHT:
        return {Action(Kind.BACKWARD_INPUT, stage, microbatch, part)}
    is_forward = kind is Kind.FORWARD
    neighbour = (placement.previous_stage if is_forward else placement.next_stage)[stage]
    other = part - 1 if is_forward else part + 1
    found = set() if is_forward else {Action(Kind.FORWARD, stage, microbatch, part)}
    if neighbour >= 0:
        found.add(Action(kind, neighbour, microbatch, part))
    if 0 <= other < schedule.num_slices:
        found.add(Action(kind, stage, microbatch, other))
    return found


@st.composite
def feasible_schedules(draw):
    """Random orders that can run: any placement, whole or split backwards, slices, some overlapped pairs."""
    placement = draw(placements())
    num_microbatches, num_slices = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    routes = np.zeros(num_microbatches, np.int8)
    if len(placement.routes) > 1:
        num_microbatches = max(num_microbatches, 2)
        routes = np.array([index % 2 for index in range(num_microbatches)], np.int8)
    split, whole = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (Kind.FORWARD, Kind.BACKWARD)
    kinds = draw(st.sampled_from([split, whole, (Kind.FORWARD,)]))
    shape = {"num_microbatches": num_microbatches, "num_slices": num_slices, "route_of_microbatch": routes}
    frame = Schedule.from_actions("random", placement, [[] for _ in range(placement.num_ranks)], **shape)
    waiting = {
        Action(kind, stage, microbatch, part)
        for microbatch in range(num_microbatches)
        for stage in placement.routes[routes[microbatch]]
        for kind in kinds
        for part in range(num_slices)
    }
    orders = _random_orders(frame, waiting, draw(st.randoms(use_true_random=False)))
    return Schedule.from_actions("random", placement, orders, **shape)


def _random_orders(frame, waiting, chance):
    """Run the actions in a random order that keeps what they need; sometimes two of a rank at once."""
    orders = [[] for _ in range(frame.num_ranks)]
    waiting, done = sorted(waiting, key=str), set()
    while waiting:
        ready = [action for action in waiting if needs(action, frame) <= done]
        first = chance.choice(ready)
        rank = frame.placement.rank_of_stage[first.stage]
        partners = [a for a in ready if a != first and frame.placement.rank_of_stage[a.stage] == rank]
        taken = [first, chance.choice(partners)] if partners and chance.random() < 0.2 else [first]
        orders[rank].append(OverlappedPair(*taken) if len(taken) == 2 else first)
        done.update(taken)
        waiting = [action for action in waiting if action not in done]
    return orders
