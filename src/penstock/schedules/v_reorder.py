"""Reordering: moves what ranks of a V run into earlier idle slots, as far as dependencies and memory allow.

A repeated building block idles while the first microbatches come in and the last ones go out. Reordering, a step of
"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), uses these slots. It looks at everything once, slot
after slot and rank after rank, and moves it to the first slot that

* is idle, and later than what it waits for and than the same leg of the microbatch before, and
* lets no rank hold more activations than the rank that held most before.

What lies between the first backward home on rank 0 and the first forward out of the last microbatch after it is the
steady state, in which a split block has no idle slots, and stays.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.hot import Hot
from penstock.schedules.v_slots import BACKWARDS, FORWARDS, IDLE, Leg, Slots, owed, pays

Counts = NDArray[np.int32]


def move_earlier(slots: Slots) -> Slots:
    """Reorder beginning and end of a table whose weight parts have their slots."""
    return _move_earlier(slots, num_backward_slots=1, still=(_first_home(slots), _last_out(slots)))


def move_whole_earlier(slots: Slots) -> Slots:
    """Reorder a table of whole backwards, each of which stays in two slots."""
    nowhere = (slots.size, slots.size)
    return _move_earlier(slots, num_backward_slots=2, still=nowhere)


def move_end_earlier(slots: Slots) -> Slots:
    """Reorder the end of a table without weight parts: idle slots count as running those that are owed."""
    moved = slots.copy()
    idle = slots == IDLE
    waiting = owed(slots, BACKWARDS, idle)
    live = _sums(np.isin(slots, FORWARDS), pays(slots, BACKWARDS, idle))
    _MOVE_END(moved.size, moved, live, waiting, *_notes(slots), _last_out(slots), int(live.max()))
    return moved


def _move_earlier(slots: Slots, *, num_backward_slots: int, still: tuple[int, int]) -> Slots:
    """Move all but what lies in the two places `still` or between; a place is slot x ranks + rank."""
    moved = slots.copy()
    live = _sums(np.isin(slots, FORWARDS), slots == Leg.WEIGHT)
    begun = np.cumsum(np.isin(slots, BACKWARDS), axis=1, dtype=np.int32)
    _MOVE(moved.size, moved, live, begun, *_notes(slots), *still, num_backward_slots, int(live.max()))
    return moved


def _sums(takes: NDArray[np.bool_], frees: NDArray[np.bool_]) -> Counts:
    """[num_ranks, num_slots] activations alive after each slot."""
    sums: Counts = np.cumsum(takes.astype(np.int8) - frees.astype(np.int8), axis=1, dtype=np.int32)
    return sums


def _notes(slots: Slots) -> tuple[Counts, Counts]:
    """Make what a pass notes: [num_ranks, 6] how often it saw each leg, and in which slots it left the latest ones.

    The slots are [num_ranks, 6, num_microbatches], a ring where a leg comes more often than that.
    """
    num_ranks, num_microbatches = len(slots), int((slots[0] == Leg.FORWARD_OUT).sum())
    return np.zeros((num_ranks, 6), np.int32), np.zeros((num_ranks, 6, num_microbatches), np.int32)


def _first_home(slots: Slots) -> int:
    """The place of the first backward home on rank 0."""
    return len(slots) * int(np.argmax(slots[0] == Leg.BACKWARD_HOME))


def _last_out(slots: Slots) -> int:
    """The first place after `_first_home` in which a rank runs its last forward out; the last place if none does."""
    from_the_end = np.argmax(slots[:, ::-1] == Leg.FORWARD_OUT, axis=1)
    places = (slots.shape[1] - 1 - from_the_end) * len(slots) + np.arange(len(slots))
    return int(min(places[places >= _first_home(slots)], default=slots.size))


# Legs in the loops below are numbers: 0 idle, 1 and 2 forward, 3 and 4 backward, 5 weight part; odd ones go out.


def _ready(left: Any, rank: int, leg: int, index: int, num_backward_slots: int) -> int:
    """The first slot after what a leg waits for.

    That is the microbatch before, and the same leg on the rank before, or the leg before where the V turns round.
    """
    ready = 0 if index == 0 else left[rank, leg, (index - 1) % left.shape[2]] + 1
    if leg == 5 or (leg == 1 and rank == 0):
        return ready
    before = rank - 1 if leg % 2 == 1 else rank + 1
    if before < 0 or before == left.shape[0]:
        before = rank
        leg -= 1
    after: int = left[before, leg, index] + (num_backward_slots if leg > 2 else 1)
    return max(ready, after)


def _first_slot(
    slots: Any, live: Any, begun: Any, rank: int, slot: int, ready: int, index: int, num_backward_slots: int, limit: int
) -> int:
    """The first slot from `ready` on to which what runs in `slot` may move; `slot` if there is none."""
    leg = slots[rank, slot]
    target = ready
    if leg < 3:
        target = slot
        while target > ready and live[rank, target - 1] < limit:
            target -= 1
    if leg == 5:
        while target < slot and begun[rank, target] <= index:
            target += 1
    num_more = num_backward_slots - 1 if leg == 3 or leg == 4 else 0
    while target < slot and (slots[rank, target] != 0 or slots[rank, target + num_more] != 0):
        target += 1
    return target


def _take_along(slots: Any, live: Any, begun: Any, rank: int, slot: int, target: int, num_backward_slots: int) -> None:
    """Move what runs in `slot` to `target`, and count again what lives and what has begun in between."""
    leg = slots[rank, slot]
    slots[rank, slot] = 0
    slots[rank, target] = leg
    is_whole = num_backward_slots == 2 and leg > 2
    if is_whole:
        slots[rank, slot + 1] = 0
        slots[rank, target + 1] = 5
    for passed in range(target, slot):
        if leg < 3:
            live[rank, passed] += 1
        elif leg == 5:
            live[rank, passed] -= 1
        elif is_whole:
            live[rank, passed + 1] -= 1
        else:
            begun[rank, passed] += 1


def _move_all(
    slots: Any, live: Any, begun: Any, seen: Any, left: Any, still_from: int, still_to: int, num_backward_slots: int,
    limit: int,
) -> None:  # fmt: skip
    num_ranks, num_slots = slots.shape
    for slot in range(num_slots):
        for rank in range(num_ranks):
            leg = slots[rank, slot]
            if leg == 0 or (leg == 5 and num_backward_slots == 2):  # a second slot goes with its first
                continue
            index = seen[rank, leg]
            seen[rank, leg] += 1
            place = slot * num_ranks + rank
            target = slot
            if place < still_from or place > still_to:
                ready = _ready(left, rank, leg, index, num_backward_slots)
                target = _first_slot(slots, live, begun, rank, slot, ready, index, num_backward_slots, limit)
            if target < slot:
                _take_along(slots, live, begun, rank, slot, target, num_backward_slots)
            left[rank, leg, index % left.shape[2]] = target


def _replay(slots: Any, live: Any, waiting: Any, rank: int, target: int, keeps: bool) -> int:
    """Count again from `target` on, after something moved there; return the most that lives, and note it if wanted."""
    alive = 0 if target == 0 else live[rank, target - 1]
    owed_weights = 0 if target == 0 else waiting[rank, target - 1]
    most = 0
    for now in range(target, slots.shape[1]):
        leg = slots[rank, now]
        if leg == 0 and owed_weights > 0:
            owed_weights -= 1
            alive -= 1
        elif leg > 2:
            owed_weights += 1
        elif leg > 0:
            alive += 1
        most = max(most, alive)
        # Up to the slot that it left, their difference is not the old one; once both are, the rest is as before.
        if alive == live[rank, now] and owed_weights == waiting[rank, now]:
            break
        if keeps:
            live[rank, now] = alive
            waiting[rank, now] = owed_weights
    return most


def _first_fitting(slots: Any, live: Any, waiting: Any, rank: int, slot: int, ready: int, limit: int) -> int:
    """Move what runs in `slot` to the first idle slot from `ready` on that memory allows; return it, or `slot`."""
    leg = slots[rank, slot]
    for target in range(ready, slot):
        if slots[rank, target] != 0:
            continue
        slots[rank, slot] = 0
        slots[rank, target] = leg
        if _replay(slots, live, waiting, rank, target, False) <= limit:
            _replay(slots, live, waiting, rank, target, True)
            return target
        slots[rank, target] = 0
        slots[rank, slot] = leg
    return slot


def _move_end(slots: Any, live: Any, waiting: Any, seen: Any, left: Any, still_to: int, limit: int) -> None:
    num_ranks, num_slots = slots.shape
    for slot in range(num_slots):
        for rank in range(num_ranks):
            leg = slots[rank, slot]
            if leg == 0:
                continue
            index = seen[rank, leg]
            seen[rank, leg] += 1
            target = slot
            if slot * num_ranks + rank > still_to:
                target = _first_fitting(slots, live, waiting, rank, slot, _ready(left, rank, leg, index, 1), limit)
            left[rank, leg, index] = target


_MOVE = Hot(_move_all, _take_along, _first_slot, _ready)
_MOVE_END = Hot(_move_end, _first_fitting, _replay, _ready)
