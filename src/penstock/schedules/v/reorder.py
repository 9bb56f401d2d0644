"""Reordering: moves passes of a V into earlier idle slots, as far as dependencies and memory allow.

It looks at every pass once, slot after slot and rank after rank, and moves it to the first slot that

* is idle, and later than what the pass waits for and than the same pass of the microbatch before, and
* lets no rank hold more activations than the rank that held most before.

From the first BACKWARD_EARLIER of rank 0 to the first FORWARD_EARLIER of the last microbatch after it, a split block is
in its steady state: it has no idle slots, and stays.
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.ir.hot import Hot
from penstock.schedules.v.slots import BACKWARDS, FORWARDS, IDLE, Pass, Slots, is_any, pays


class _Table(NamedTuple):
    """A table of slots, what follows from it, and which passes were looked at."""

    slots: Any
    live: Any
    """[num_ranks, num_slots] activations alive after each slot."""
    owed: Any
    """[num_ranks, num_slots] weight gradients that wait after each slot."""
    seen: Any
    """[num_ranks, 6] how often each pass was looked at."""
    left: Any
    """[num_ranks, 6, num_microbatches] where the latest ones were left: a ring for weight gradients, of which there are
    more than microbatches."""


class _Rule(NamedTuple):
    """The moves that are allowed: of which passes, and where to; a place is slot x ranks + rank."""

    still_from: int
    still_to: int
    limit: int
    fills_idle: bool
    """Idle slots count as running the weight gradients that are owed; the table has none of its own."""
    backward_slots: int


def move_earlier(slots: Slots) -> Slots:
    """Reorder beginning and end of a table whose weight gradients have their slots."""
    return _move(slots, _steady_begin(slots), _steady_end(slots))


def move_whole_earlier(slots: Slots) -> Slots:
    """Reorder a table of whole backwards, each of which stays in two slots."""
    return _move(slots, slots.size, slots.size, backward_slots=2)


def move_end_earlier(slots: Slots) -> Slots:
    """Reorder the end of a table without weight gradients."""
    return _move(slots, 0, _steady_end(slots), fills_idle=True)


def _move(slots: Slots, still_from: int, still_to: int, *, fills_idle: bool = False, backward_slots: int = 1) -> Slots:
    """Move all but what is in the two places, or between them."""
    moved = slots.copy()
    # An activation lives from its forward to its weight gradient, so backwards change what is owed and not what lives.
    frees = pays(slots, BACKWARDS, slots == IDLE) if fills_idle else slots == Pass.WEIGHT
    live, owed = (
        np.cumsum(is_any(slots, takes).astype(np.int8) - frees, axis=1, dtype=np.int32)
        for takes in (FORWARDS, BACKWARDS)
    )
    num_ranks, num_microbatches = len(slots), int((slots[0] == Pass.FORWARD_EARLIER).sum())
    seen, left = np.zeros((num_ranks, 6), np.int32), np.zeros((num_ranks, 6, num_microbatches), np.int32)
    rule = _Rule(still_from, still_to, int(live.max()), fills_idle, backward_slots)
    _MOVE(moved.size, _Table(moved, live, owed, seen, left), rule)
    return moved


def _steady_begin(slots: Slots) -> int:
    """The place of the first BACKWARD_EARLIER of rank 0."""
    return len(slots) * int(np.argmax(slots[0] == Pass.BACKWARD_EARLIER))


def _steady_end(slots: Slots) -> int:
    """The first place from there on in which a rank runs its last FORWARD_EARLIER; the last place if none does."""
    from_the_end = np.argmax(slots[:, ::-1] == Pass.FORWARD_EARLIER, axis=1)
    places = (slots.shape[1] - 1 - from_the_end) * len(slots) + np.arange(len(slots))
    return int(min(places[places >= _steady_begin(slots)], default=slots.size))


# Passes in the loops below are numbers: 0 idle, 1 and 2 forward, 3 and 4 backward, 5 weight gradient. Odd ones go from
# the first rank to the last.


def _move_all(table: _Table, rule: _Rule) -> None:
    num_ranks, num_slots = table.slots.shape
    # Slot after slot: what a pass waits for ran in an earlier slot, so `left` already says where it stays.
    for slot in range(num_slots):
        for rank in range(num_ranks):
            what = table.slots[rank, slot]
            if what == 0 or (what == 5 and rule.backward_slots == 2):  # a second slot goes with its first
                continue
            index = table.seen[rank, what]
            table.seen[rank, what] += 1
            place = slot * num_ranks + rank
            target = slot
            if place < rule.still_from or place > rule.still_to:
                ready = _ready(table.left, rank, what, index, rule.backward_slots)
                target = _first_fitting(table, rule, rank, slot, ready)
            table.left[rank, what, index % table.left.shape[2]] = target


def _ready(left: Any, rank: int, what: int, index: int, backward_slots: int) -> int:
    """The first slot after what a pass waits for.

    That is the microbatch before, and the same pass on the rank before, or the pass before where the V turns round.
    """
    ready = 0 if index == 0 else left[rank, what, (index - 1) % left.shape[2]] + 1
    if what == 5 or (what == 1 and rank == 0):
        return ready
    before = rank - 1 if what % 2 == 1 else rank + 1
    if before < 0 or before == left.shape[0]:
        before = rank
        what -= 1
    after: int = left[before, what, index] + (backward_slots if what > 2 else 1)
    return max(ready, after)


def _first_fitting(table: _Table, rule: _Rule, rank: int, slot: int, ready: int) -> int:
    """Move what runs in `slot` to the first idle slot from `ready` on that memory allows; return it, or `slot`."""
    slots, what = table.slots, table.slots[rank, slot]
    is_wide = rule.backward_slots == 2 and what > 2
    first = ready if rule.fills_idle else _first_allowed(table, rule.limit, rank, slot, ready)
    for target in range(first, slot):
        if slots[rank, target] != 0 or (is_wide and slots[rank, target + 1] != 0):
            continue
        _swap(slots, rank, slot, target, is_wide)
        if not rule.fills_idle:
            _count_move(table, rank, slot, target, is_wide)
            return target
        if _fits(table, rule.limit, rank, target, False):
            _fits(table, rule.limit, rank, target, True)
            return target
        _swap(slots, rank, target, slot, is_wide)
    return slot


def _first_allowed(table: _Table, limit: int, rank: int, slot: int, ready: int) -> int:
    """The first slot from `ready` on to which memory lets a pass move, where idle slots run nothing.

    A forward is alive from there on, so no slot between may be full. A weight gradient must be owed in all of them.
    """
    what = table.slots[rank, slot]
    if what == 3 or what == 4:
        return ready
    first = slot
    while first > ready and (table.live[rank, first - 1] < limit if what < 3 else table.owed[rank, first - 1] > 0):
        first -= 1
    return first


def _count_move(table: _Table, rank: int, slot: int, target: int, is_wide: bool) -> None:
    """Count what a pass that moved from `slot` to `target` takes or frees in the slots between them."""
    what = table.slots[rank, target]
    if is_wide:  # the second slot frees, and nothing moves that is owed
        for now in range(target + 1, slot + 1):
            table.live[rank, now] -= 1
    elif what < 3:
        for now in range(target, slot):
            table.live[rank, now] += 1
    elif what < 5:
        for now in range(target, slot):
            table.owed[rank, now] += 1
    else:
        for now in range(target, slot):
            table.live[rank, now] -= 1
            table.owed[rank, now] -= 1


def _swap(slots: Any, rank: int, slot: int, target: int, is_wide: bool) -> None:
    """Swap a pass with an idle slot; a wide pass also has the slot after its own, and needs two."""
    slots[rank, target] = slots[rank, slot]
    slots[rank, slot] = 0
    if is_wide:
        slots[rank, target + 1] = 5
        slots[rank, slot + 1] = 0


def _fits(table: _Table, limit: int, rank: int, target: int, keeps: bool) -> bool:
    """Whether memory allows what a rank runs from `target` on, after something moved there; note it if wanted.

    Idle slots run the weight gradients that are owed.
    """
    alive = 0 if target == 0 else table.live[rank, target - 1]
    owed = 0 if target == 0 else table.owed[rank, target - 1]
    for now in range(target, table.slots.shape[1]):
        what = table.slots[rank, now]
        if what > 2:
            owed += 1
        elif what > 0:
            alive += 1
        elif owed > 0:
            owed -= 1
            alive -= 1
        if alive > limit:
            return False
        # Between the two slots of the move the counts differ from the old ones. Once both agree, the rest is unchanged.
        if alive == table.live[rank, now] and owed == table.owed[rank, now]:
            break
        if keeps:
            table.live[rank, now] = alive
            table.owed[rank, now] = owed
    return True


_MOVE = Hot(_move_all, _first_fitting, _first_allowed, _count_move, _fits, _swap, _ready)
