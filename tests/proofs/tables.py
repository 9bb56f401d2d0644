"""Tables to prove and to break: valid ones, random feasible ones, and an edit of a rank's order."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.instruction import Instruction, Op
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from tests.support.actions import parse_action
from tests.support.strategies import feasible_schedules, needs

SHAPES = [
    ("sequential", 1, 2, {}),
    ("sequential", 3, 2, {}),
    ("gpipe", 2, 3, {}),
    ("gpipe", 3, 4, {"backward_order": "descending"}),
    ("1f1b", 2, 3, {}),
    ("1f1b", 4, 6, {}),
    ("1f1b", 4, 3, {"warmup": "eager"}),
]
VALID = [
    pytest.param(build(name, ranks=ranks, microbatches=microbatches, **options), id=f"{name}-{ranks}-{microbatches}")
    for name, ranks, microbatches, options in SHAPES
]


def schedule_of(text, *, placement=None, microbatches=None, slices=1):
    """Read one line of actions per rank."""
    orders = [[parse_action(word) for word in line.split()] for line in text.strip().splitlines()]
    singles = [a for order in orders for pair in order for a in ([pair] if isinstance(pair, Action) else [pair.first])]
    count = max(action.microbatch for action in singles) + 1 if microbatches is None else microbatches
    where = Placement.line(len(orders)) if placement is None else placement
    return Schedule.from_actions("drawn", where, orders, num_microbatches=count, num_slices=slices)


def with_orders(table, orders):
    """Give a schedule or program other orders."""
    if isinstance(table, Schedule):
        return Schedule.from_actions(
            table.name,
            table.placement,
            orders,
            num_microbatches=table.num_microbatches,
            num_slices=table.num_slices,
            route_of_microbatch=table.route_of_microbatch,
        )
    rows = [row for order in orders for row in order]
    names = ("op", "stage", "microbatch", "slice", "peer", "slot")
    columns = {name: np.array([getattr(row, name) for row in rows], np.int32) for name in names}
    offsets = np.concatenate([[0], np.cumsum([len(order) for order in orders])])
    return replace(table, **columns, joined=np.zeros(len(rows), np.bool_), offsets=offsets)


def edited(table, edit):
    """Return the table after `edit` has changed its list of orders."""
    orders = [list(table[rank]) for rank in range(table.num_ranks)]
    edit(orders)
    return with_orders(table, orders)


def find(table, text):
    """Return (rank, position) of the first action or instruction with this text."""
    for rank in range(table.num_ranks):
        texts = [str(row) for row in table[rank]]
        if text in texts:
            return rank, texts.index(text)
    raise LookupError(text)


def without(table, text):
    rank, position = find(table, text)
    return edited(table, lambda orders: orders[rank].pop(position))


def swapped(table, one, other):
    """Exchange two rows of one rank."""
    (rank, a), (_, b) = find(table, one), find(table, other)

    def swap(orders):
        orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]

    return edited(table, swap)


def refusal(table, **limits):
    with pytest.raises(ScheduleError) as caught:
        check(table, **limits)
    return caught.value


def violations_of(table, **limits):
    try:
        check(table, **limits)
    except ScheduleError as error:
        return error.violations
    return ()


def assert_refused(table, place, *words, **limits):
    """The check finds a violation at (rank, position, text) or at a text, with all the words, a fix, and a picture."""
    place = (*find(table, place), place) if isinstance(place, str) else place
    error = refusal(table, **limits)
    found = [v for v in error.violations if (v.rank, v.position, v.action) == place]
    assert any(all(word in str(v) for word in words) and v.fix for v in found), str(error)
    assert "<-- here" in error.picture
    return error


@dataclass
class Case:
    """A random feasible schedule, and the source of chance to go on with."""

    schedule: Schedule
    chance: random.Random


def runs(schedule):
    """A walk of its own: whether every rank can run its order to the end."""
    orders = [list(schedule[rank]) for rank in range(len(schedule))]
    needed = {action: needs(action, schedule) for order in orders for action in order}
    done = set()
    while True:
        heads = [order for order in orders if order and needed[order[0]] <= done]
        if not heads:
            return not any(orders)
        for order in heads:
            done.add(order.pop(0))


def lowered(name="1f1b", ranks=2, microbatches=3, **options):
    return lower(build(name, ranks=ranks, microbatches=microbatches), **options)


def instruction(op, stage, microbatch=0, *, peer=None, slot=0):
    return Instruction(Op(op), stage, microbatch, 0, stage if peer is None else peer, slot)


def rewritten(schedule, text):
    """Lower the schedule and put each rank's instructions in the order of the text, a line per rank."""
    program = lower(schedule)
    rows = {str(row): row for rank in range(len(program)) for row in program[rank]}
    orders = [[rows[word] for word in line.split()] for line in text.strip().splitlines()]
    return replace(with_orders(program, orders), omits_reductions="REDUCE" not in text)


@st.composite
def feasible_cases(draw):
    """Random placements, sizes and orders that can run: of training, without pairs."""
    schedule = draw(feasible_schedules().filter(lambda schedule: not schedule.is_forward_only))
    apart = replace(schedule, joined=np.zeros_like(schedule.joined))
    return Case(apart, random.Random(draw(st.integers(0, 2**32))))
