"""Random programs with a few rows moved, dropped, doubled or renamed, judged by `check` and by a plain machine.

Under each transport model, `check` must pass exactly what the machine of that model (`tests/proofs/machine.py`) runs to
its end.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.operations import NAMES_MICROBATCH, Op
from penstock.ir.program import Program
from penstock.lowering import add_offloads, assign_slots, coalesce_messages, lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import groups
from tests.proofs.machine import verdicts
from tests.support.strategies import ends, one_of_each_rank

MODELS = ("posted", "rendezvous", "pair_fifo", "coalesced")
COLUMN_NAMES = ("op", "stage", "microbatch", "slice", "peer", "slot")


@dataclass(frozen=True)
class Case:
    """A program, and what was done to it."""

    program: Program
    changes: tuple[str, ...]


def cases(count, seed):
    """Make mutated programs, the same ones for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        yield mutated(random_program(chance), chance)


def random_program(chance):
    """A small program of any family, with tied groups, lowered for either order of receives."""
    while True:
        family = chance.choice(list(FAMILIES.values()))
        try:
            schedule = build(
                family.name,
                ranks=chance.choice([1, 2, 2, 3, 3, 4]),
                microbatches=chance.randint(1, 5),
                stages_per_rank=chance.choice([None, *(count or 2 for count in family.stages_per_rank)]),
                slices=chance.randint(1, 3) if family.takes_slices else 1,
                forward_only=chance.random() < 0.05,
            )
        except ConfigError:
            continue
        groups = []
        while chance.random() < 0.4:
            chosen = chance.sample(range(schedule.num_stages), min(schedule.num_stages, chance.choice([2, 2, 3])))
            groups.append(one_of_each_rank(schedule.placement, chosen) if chance.random() < 0.7 else ends(schedule))
        transport = chance.choice(["posted", "coalesced"])
        added = {"loads": chance.random() < 0.2, "barriers": chance.random() < 0.2}
        program = lower(schedule, transport, tied_groups=groups, optimizer_step=chance.random() < 0.3, **added)
        program = with_recomputations(program, chance) if chance.random() < 0.2 else program
        if program.is_forward_only or chance.random() < 0.8:
            return program
        stages = [stage for stage in range(program.num_stages) if chance.random() < 0.7]
        return assign_slots(add_offloads(program, stages))


def with_recomputations(program, chance):
    """Put a recomputation before some backwards."""
    orders = [groups(program, rank) for rank in range(len(program))]
    for order in orders:
        for unit in list(order):
            again = [row for row in unit if row.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and chance.random() < 0.6]
            at = next(at for at, other in enumerate(order) if other is unit)
            order[at:at] = [[replace(row, op=Op.RECOMPUTE)] for row in again]
    return assign_slots(with_units(program, orders))


def mutated(program, chance, mutations=None):
    """Change a program in one to three places, or not at all; numbers that no program can hold are not tried."""
    while True:
        orders = [groups(program, rank) for rank in range(len(program))]
        chosen = chance.choices(list(mutations or MUTATIONS), k=chance.choice([0, 1, 1, 1, 2, 2, 3]))
        for change in chosen:
            change(orders, chance)
        try:
            changed = assign_slots(with_units(program, orders))
            if chance.random() < 0.3:
                changed = coalesce_messages(changed, chance.choice(["rank", "peer"]))
            return Case(changed, tuple(change.__name__ for change in chosen))
        except ScheduleError:
            continue


def with_units(program, orders):
    rows = [row for order in orders for unit in order for row in unit]
    joined = [at < len(unit) - 1 for order in orders for unit in order for at in range(len(unit))]
    columns = {
        name: np.array([getattr(row, name) for row in rows], getattr(program, name).dtype) for name in COLUMN_NAMES
    }
    assert set(columns) | {"joined", "group"} == set(Program.COLUMNS)
    offsets = np.cumsum([0, *(sum(map(len, order)) for order in orders)])
    return replace(program, **columns, joined=np.array(joined, np.bool_), offsets=offsets)


# ---- what is done to a program: each takes the units of all ranks and changes them


def swap_neighbours(orders, chance):
    order = chance.choice(orders)
    if len(order) > 1:
        at = chance.randrange(len(order) - 1)
        order[at : at + 2] = reversed(order[at : at + 2])


def move_a_little(orders, chance):
    order = chance.choice(orders)
    if order:
        at = chance.randrange(len(order))
        order.insert(max(0, at + chance.randint(-3, 3)), order.pop(at))


def move_far(orders, chance):
    order = chance.choice(orders)
    if order:
        unit = order.pop(chance.randrange(len(order)))
        order.insert(chance.randint(0, len(order)), unit)


def move_a_message(orders, chance):
    _move_one(orders, chance, lambda op: op.is_send or op.is_receive, [-4, -3, -2, -1, 1, 2, 3, 4])


def move_a_collective(orders, chance):
    collectives = (Op.REDUCE_TIED, Op.REDUCE_GRADIENT, Op.OPTIMIZER_STEP, Op.BARRIER)
    _move_one(orders, chance, lambda op: op in collectives, range(-6, 3))


def move_a_copy(orders, chance):
    _move_one(orders, chance, lambda op: op in (Op.OFFLOAD, Op.RELOAD, Op.LOAD), range(-8, 9))


def move_a_receive_behind_its_consumer(orders, chance):
    places = _places(orders, lambda row: row.op.is_receive)
    if places:
        rank, at = chance.choice(places)
        order = orders[rank]
        receive = order.pop(at)
        names = (receive[0].stage, receive[0].microbatch, receive[0].slice)
        kinds = (Op.FORWARD,) if receive[0].op is Op.RECEIVE_FORWARD else (Op.BACKWARD, Op.BACKWARD_INPUT)
        found = [
            at for at, unit in enumerate(order)
            if any(row.op in kinds and (row.stage, row.microbatch, row.slice) == names for row in unit)
        ]  # fmt: skip
        order.insert(found[0] + 1 if found else len(order), receive)


def delay_sends(orders, chance):
    """Move the sends of one channel, from some send on, a few rows back; they keep their order."""
    _shift(orders, chance, (Op.SEND_FORWARD, Op.SEND_BACKWARD), chance.randint(1, 6))


def hurry_receives(orders, chance):
    """Move the receives of one channel, up to some receive, a few rows to the front; they keep their order."""
    _shift(orders, chance, (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD), -chance.randint(1, 6))


def swap_computations(orders, chance):
    """Exchange two computations of one kind and stage, and nothing else."""
    places = _places(orders, lambda row: row.op.is_compute)
    if places:
        rank, at = chance.choice(places)
        row = orders[rank][at][0]
        others = [
            other for other, unit in enumerate(orders[rank])
            if len(unit) == len(orders[rank][at]) and unit[0].op is row.op and unit[0].stage == row.stage
        ]  # fmt: skip
        other = chance.choice(others)
        orders[rank][at], orders[rank][other] = orders[rank][other], orders[rank][at]


def swap_on_one_channel(orders, chance):
    """Exchange two sends of one rank, or two receives, and perhaps their other ends as well."""
    op = chance.choice([Op.SEND_FORWARD, Op.SEND_BACKWARD])
    places = _places(orders, lambda row: row.op is op)
    if len(places) > 1:
        (one_rank, one), (other_rank, other) = chance.sample(places, 2)
        if one_rank == other_rank:
            first, second = orders[one_rank][one], orders[one_rank][other]
            orders[one_rank][one], orders[one_rank][other] = second, first
            if chance.random() < 0.7:
                _swap_ends(orders, first[0], second[0])


def drop(orders, chance):
    order = chance.choice(orders)
    if len(order) > 1:
        order.pop(chance.randrange(len(order)))


def duplicate(orders, chance):
    order = chance.choice(orders)
    if order:
        order.insert(chance.randint(0, len(order)), list(chance.choice(order)))


def change_a_peer(orders, chance):
    places = _places(orders, lambda row: not row.op.is_compute)
    if places:
        rank, at = chance.choice(places)
        orders[rank][at] = [replace(orders[rank][at][0], peer=chance.randint(-1, 2 * len(orders)))]


def rename(orders, chance):
    rank = chance.randrange(len(orders))
    if orders[rank]:
        at = chance.randrange(len(orders[rank]))
        unit = orders[rank][at]
        names = ["stage", "microbatch", "slice"] if NAMES_MICROBATCH[unit[0].op] else ["stage"]
        name = chance.choice(names)
        orders[rank][at] = [replace(unit[0], **{name: chance.randint(0, 3)}), *unit[1:]]


def pair_up(orders, chance):
    """Let two neighbouring computations run together, or take such a pair apart."""
    order = chance.choice(orders)
    pairs = [at for at, unit in enumerate(order) if len(unit) == 2]
    neighbours = [
        at for at in range(len(order) - 1)
        if len(order[at]) == len(order[at + 1]) == 1 and order[at][0].op.is_compute and order[at + 1][0].op.is_compute
    ]  # fmt: skip
    if pairs and chance.random() < 0.5:
        at = chance.choice(pairs)
        order[at : at + 1] = [[row] for row in order[at]]
    elif neighbours:
        at = chance.choice(neighbours)
        order[at : at + 2] = [[*order[at], *order[at + 1]]]


REORDERINGS = (
    delay_sends, delay_sends, delay_sends, hurry_receives, hurry_receives, swap_computations, swap_neighbours,
    move_a_little, move_far, move_a_message, move_a_collective, move_a_copy, swap_on_one_channel, pair_up,
)  # fmt: skip
MUTATIONS = (*REORDERINGS, *REORDERINGS, move_a_receive_behind_its_consumer, drop, duplicate, change_a_peer, rename)


def _move_one(orders, chance, is_wanted, distances):
    """Move one row of some operation by one of these numbers of rows."""
    places = _places(orders, lambda row: is_wanted(row.op))
    if places:
        rank, at = chance.choice(places)
        orders[rank].insert(max(0, at + chance.choice(distances)), orders[rank].pop(at))


def _shift(orders, chance, ops, distance):
    """Move messages of one rank and direction by some rows; those on one channel do not pass each other."""
    places = _places(orders, lambda row: row.op in ops)
    if places:
        rank, first = chance.choice(places)
        chosen = orders[rank][first][0]
        same = [
            at for own, at in places
            if own == rank and (orders[rank][at][0].op, orders[rank][at][0].stage) == (chosen.op, chosen.stage)
        ]  # fmt: skip
        same = [at for at in reversed(same) if at >= first] if distance > 0 else [at for at in same if at <= first]
        for at in same:
            orders[rank].insert(max(0, at + distance), orders[rank].pop(at))


def _places(orders, is_wanted):
    return [
        (rank, at) for rank, order in enumerate(orders) for at, unit in enumerate(order) if is_wanted(unit[0])
    ]  # fmt: skip


def _swap_ends(orders, one, other):
    """Exchange the receives of two sends."""
    ops = {Op.SEND_FORWARD: Op.RECEIVE_FORWARD, Op.SEND_BACKWARD: Op.RECEIVE_BACKWARD}
    found = []
    for send in (one, other):
        wanted = (ops[send.op], send.peer, send.microbatch, send.slice, send.stage)
        found += _places(
            orders, lambda row, wanted=wanted: (row.op, row.stage, row.microbatch, row.slice, row.peer) == wanted
        )
    if len(found) == 2 and found[0][0] == found[1][0]:
        (rank, first), (_, second) = found
        orders[rank][first], orders[rank][second] = orders[rank][second], orders[rank][first]


# ---- the comparison


def passes(program, model):
    try:
        check(program, model)
    except ScheduleError:
        return False
    return True


def differences(found):
    """Return (case, model, what `check` says, what the machine says) wherever they differ; count the verdicts."""
    counts, differing = Counter(), []
    for case in found:
        for model, judged in verdicts(case.program, MODELS).items():
            counts[model, judged] += 1
            if passes(case.program, model) != (judged == "ends"):
                differing.append((case, model, judged))
    return counts, differing
