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
    num_seen: Any
    """[num_ranks, 6] how often each pass was looked at, which is the microbatch of the next one."""
    slot_of_pass: Any
    """[num_ranks, 6, num_microbatches] the slot in which each pass of each microbatch stays. For weight gradients, of
    which there are more than microbatches, it is a ring of the latest ones."""


class _Rule(NamedTuple):
    """The rule for moves. Passes between two places stay; a place is slot x num_ranks + rank."""

    still_from: int
    still_to: int
    max_activations: int
    """The most activations that a rank may hold."""
    fills_idle: bool
    """Whether idle slots count as running the weight gradients that are owed; then the table has none of its own."""
    backward_slots: int
    """The slots that a backward takes: 2 for a whole one."""


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
    """Move all passes earlier but those in the two places, or between them."""
    new_slots = slots.copy()
    # An activation lives from its forward to its weight gradient, so backwards change what is owed and not what lives.
    frees = pays(slots, BACKWARDS, slots == IDLE) if fills_idle else slots == Pass.WEIGHT
    live, owed = (
        np.cumsum(is_any(slots, takes).astype(np.int8) - frees, axis=1, dtype=np.int32)
        for takes in (FORWARDS, BACKWARDS)
    )
    num_ranks, num_microbatches = len(slots), int((slots[0] == Pass.FORWARD_EARLIER).sum())
    num_seen, slot_of_pass = np.zeros((num_ranks, 6), np.int32), np.zeros((num_ranks, 6, num_microbatches), np.int32)
    rule = _Rule(still_from, still_to, int(live.max()), fills_idle, backward_slots)
    _MOVE(new_slots.size, _Table(new_slots, live, owed, num_seen, slot_of_pass), rule)
    return new_slots


def _steady_begin(slots: Slots) -> int:
    """Return the place of the first BACKWARD_EARLIER of rank 0."""
    return len(slots) * int(np.argmax(slots[0] == Pass.BACKWARD_EARLIER))


def _steady_end(slots: Slots) -> int:
    """Return the first place after `_steady_begin` in which a rank runs its last FORWARD_EARLIER.

    It is the end of the table if no rank does.
    """
    from_the_end = np.argmax(slots[:, ::-1] == Pass.FORWARD_EARLIER, axis=1)
    places = (slots.shape[1] - 1 - from_the_end) * len(slots) + np.arange(len(slots))
    return int(min(places[places >= _steady_begin(slots)], default=slots.size))


# Numbers of passes (`Pass`) as the compiled loops below read them: forwards are 1 and 2, backwards 3 and 4. Odd numbers
# go from the first rank to the last.
FIRST_FORWARD, LAST_FORWARD = 1, 2
FIRST_BACKWARD, LAST_BACKWARD = 3, 4
WEIGHT = 5


def _move_all(table: _Table, rule: _Rule) -> None:
    """Move every pass to the first slot that the rule allows, slot after slot."""
    num_ranks, num_slots = table.slots.shape
    # Slot after slot: what a pass waits for ran in an earlier slot, so `slot_of_pass` already says where it stays.
    for slot in range(num_slots):
        for rank in range(num_ranks):
            pass_number = table.slots[rank, slot]
            if pass_number == IDLE:
                continue
            if pass_number == WEIGHT and rule.backward_slots == 2:  # the second slot moves with the first one
                continue
            index = table.num_seen[rank, pass_number]
            table.num_seen[rank, pass_number] += 1
            place = slot * num_ranks + rank
            target = slot
            if place < rule.still_from or place > rule.still_to:
                ready = _ready(table.slot_of_pass, rank, pass_number, index, rule.backward_slots)
                target = _first_fitting(table, rule, rank, slot, ready)
            table.slot_of_pass[rank, pass_number, index % table.slot_of_pass.shape[2]] = target


def _ready(slot_of_pass: Any, rank: int, pass_number: int, index: int, backward_slots: int) -> int:
    """Return the first slot in which a pass can run, after all that it waits for; `index` is its microbatch.

    It waits for the same pass of the microbatch before, and for that of its microbatch on the rank before, or for the
    pass before on its own rank where the V turns round.
    """
    ready = 0 if index == 0 else slot_of_pass[rank, pass_number, (index - 1) % slot_of_pass.shape[2]] + 1
    if pass_number == WEIGHT or (pass_number == FIRST_FORWARD and rank == 0):
        return ready
    source_rank = rank - 1 if pass_number % 2 == 1 else rank + 1
    if source_rank < 0 or source_rank == slot_of_pass.shape[0]:
        source_rank = rank
        pass_number -= 1
    after_source: int = slot_of_pass[source_rank, pass_number, index] + (
        backward_slots if pass_number > LAST_FORWARD else 1
    )
    return max(ready, after_source)


def _first_fitting(table: _Table, rule: _Rule, rank: int, slot: int, ready: int) -> int:
    """Move what runs in `slot` to the first idle slot from `ready` on that memory allows; return it, or `slot`."""
    slots, pass_number = table.slots, table.slots[rank, slot]
    is_wide = rule.backward_slots == 2 and pass_number > LAST_FORWARD
    first = ready if rule.fills_idle else _first_allowed(table, rule.max_activations, rank, slot, ready)
    for target in range(first, slot):
        if slots[rank, target] != IDLE or (is_wide and slots[rank, target + 1] != IDLE):
            continue
        _swap(slots, rank, slot, target, is_wide)
        if not rule.fills_idle:
            _count_move(table, rank, slot, target, is_wide)
            return target
        if _recount(table, rule.max_activations, rank, target, False):
            _recount(table, rule.max_activations, rank, target, True)
            return target
        _swap(slots, rank, target, slot, is_wide)
    return slot


def _first_allowed(table: _Table, max_activations: int, rank: int, slot: int, ready: int) -> int:
    """Return the first slot from `ready` on to which memory lets a pass move, where idle slots run nothing.

    A forward is alive from there on, so no slot between may be full. A weight gradient must be owed in all of them.
    """
    pass_number = table.slots[rank, slot]
    if FIRST_BACKWARD <= pass_number <= LAST_BACKWARD:
        return ready
    first = slot
    while first > ready and (
        table.live[rank, first - 1] < max_activations
        if pass_number <= LAST_FORWARD
        else table.owed[rank, first - 1] > 0
    ):
        first -= 1
    return first


def _count_move(table: _Table, rank: int, slot: int, target: int, is_wide: bool) -> None:
    """Count what a pass that moved from `slot` to `target` takes or frees in the slots between them."""
    pass_number = table.slots[rank, target]
    if is_wide:  # the second slot frees, and nothing moves that is owed
        for between in range(target + 1, slot + 1):
            table.live[rank, between] -= 1
    elif pass_number <= LAST_FORWARD:
        for between in range(target, slot):
            table.live[rank, between] += 1
    elif pass_number <= LAST_BACKWARD:
        for between in range(target, slot):
            table.owed[rank, between] += 1
    else:
        for between in range(target, slot):
            table.live[rank, between] -= 1
            table.owed[rank, between] -= 1


def _swap(slots: Any, rank: int, slot: int, target: int, is_wide: bool) -> None:
    """Swap a pass with an idle slot; a wide pass also has the slot after its own, and needs two."""
    slots[rank, target] = slots[rank, slot]
    slots[rank, slot] = IDLE
    if is_wide:
        slots[rank, target + 1] = WEIGHT
        slots[rank, slot + 1] = IDLE


def _recount(table: _Table, max_activations: int, rank: int, target: int, updates: bool) -> bool:
    """Recount what a rank holds after each slot from `target` on, after a pass moved from a later slot into `target`.

    Return whether at most `max_activations` are alive after every slot. A forward adds an activation, and a backward
    adds a weight gradient that is owed; an idle slot runs a weight gradient that is owed, which frees an activation.
    The counts are written into `table` if `updates`, which callers set only after a recount without it returned True.
    The slots of a rank hold IDLE (0), a forward (1 and 2) or a backward (3 and 4).
    """
    alive = 0 if target == 0 else table.live[rank, target - 1]
    owed = 0 if target == 0 else table.owed[rank, target - 1]
    for later_slot in range(target, table.slots.shape[1]):
        pass_number = table.slots[rank, later_slot]
        if pass_number >= FIRST_BACKWARD:
            owed += 1
        elif pass_number != IDLE:
            alive += 1
        elif owed > 0:
            owed -= 1
            alive -= 1
        if alive > max_activations:
            return False
        # Stop where both counts are as before the move: those of all later slots are so, too. Both cannot agree before
        # the slot that the pass has left: `alive - owed` is the number of forwards that have run less that of
        # backwards, and up to there it differs by the pass.
        if alive == table.live[rank, later_slot] and owed == table.owed[rank, later_slot]:
            break
        if updates:
            table.live[rank, later_slot] = alive
            table.owed[rank, later_slot] = owed
    return True


_MOVE = Hot(_move_all, _first_fitting, _first_allowed, _count_move, _recount, _swap, _ready)
