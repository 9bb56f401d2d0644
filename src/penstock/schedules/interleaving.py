"""Schedules over a loop of stages: Megatron-LM's interleaving, made right for all numbers of ranks and microbatches.

Microbatches go in groups, and a group runs on the stages of a rank one after the other: that gives each forward its
turn of `ir.interleaving`. The last rank warms up until the first microbatch is on its last stage, every other rank
`skew` turns longer than the next one. A skew of 2 leaves messages time to travel, but a microbatch is back on rank 0
after p turns only, so that groups need p microbatches, or ranks wait for each other without end. With 1 it is back
after p/2 turns.

Two things are added to Megatron-LM's rule:

1. A last group shorter than the others is padded with empty slots, up to p (or as many as the others have). Leaving
   microbatches out of an order that can run leaves an order that can run; so does leaving out the last stages, where
   their number is no multiple of p.
2. Groups below p/2 put off their next stage: see `short_groups`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.interleaving import Ints, in_turn
from penstock.ir.schedule import Schedule
from penstock.schedules.family import Shape, loop
from penstock.schedules.short_groups import first_visits


@dataclass(frozen=True, slots=True)
class Groups:
    """Microbatches in groups: how many each has, and how many slots, padded ones included, it takes on a stage."""

    sizes: Ints
    num_slots: Ints

    @classmethod
    def even(cls, shape: Shape) -> "Groups":
        """Cut into as many groups as have a microbatch for each rank, as equal as can be, larger ones first."""
        num_groups = max(1, shape.num_microbatches // shape.num_ranks)
        least, num_larger = divmod(shape.num_microbatches, num_groups)
        sizes = least + (np.arange(num_groups) < num_larger)
        return cls(sizes, sizes)

    @classmethod
    def of_size(cls, size: int, shape: Shape) -> "Groups":
        """Cut into groups of `size`; a shorter last one is padded to a slot for each rank, up to `size`."""
        size = min(size, shape.num_microbatches)
        num_full, num_left = divmod(shape.num_microbatches, size)
        sizes = np.array([size] * num_full + [num_left] * (num_left > 0))
        num_slots = np.maximum(sizes, min(size, shape.num_ranks))
        return cls(sizes, num_slots)


@dataclass(frozen=True, slots=True)
class Turns:
    """Forwards of one rank: the turn, the stage counted on the rank alone, and the microbatch of each."""

    turn: Ints
    local_stage: Ints
    microbatch: Ints

    @classmethod
    def take(cls, groups: Groups, num_local_stages: int, least_gap: int) -> "Turns":
        """Give each forward its turn; a group comes to its next stage after `least_gap` turns or more.

        A single group needs no gap: the only forwards after its backwards are those of the rank's last stage.
        """
        sizes, slots = groups.sizes, groups.num_slots
        is_short = len(sizes) > 1 and slots[0] < least_gap
        visits = first_visits(num_local_stages, -(-least_gap // int(slots[0]))) if is_short else range(num_local_stages)
        microbatch = np.arange(sizes.sum())
        slot = microbatch - np.repeat(np.cumsum(sizes) - sizes, sizes)
        num_before = np.repeat(np.cumsum(slots) - slots, sizes)
        turns = [num_local_stages * num_before + visit * np.repeat(slots, sizes) + slot for visit in visits]
        local_stage = np.repeat(np.arange(num_local_stages), len(microbatch))
        return cls(np.concatenate(turns), local_stage, np.tile(microbatch, num_local_stages))


def interleave(name: str, shape: Shape, groups: Groups, skew: int | None, held_weights: int | None = None) -> Schedule:
    """Make the schedule of these groups.

    Each rank warms up `skew` turns longer than the next one; None: with all forwards. `held_weights` splits the
    backwards: rank s runs its weight gradients `held_weights` x s input gradients late.
    """
    turns = Turns.take(groups, -(-shape.num_stages // shape.num_ranks), -(-shape.num_ranks // 2))
    # The last rank warms up until the first microbatch comes to its last stage.
    least_warmup = int(turns.turn[turns.local_stage == turns.local_stage[-1]][0])
    orders = []
    for rank in range(shape.num_ranks):
        ahead = int(turns.turn.max()) + 1 if skew is None else skew * (shape.num_ranks - 1 - rank)
        order = in_turn(turns.turn, turns.local_stage, turns.microbatch, least_warmup + ahead)
        order[:, 1] = order[:, 1] * shape.num_ranks + rank
        order = order[order[:, 1] < shape.num_stages]
        orders.append(order if held_weights is None else split_backwards(order, held_weights * rank))
    return Schedule.from_arrays(name, loop(shape), orders, num_microbatches=shape.num_microbatches)


def split_backwards(order: NDArray[np.int32], num_held: int) -> NDArray[np.int32]:
    """Split each backward; weight gradient k runs after input gradient k + num_held, or last."""
    backward = np.flatnonzero(order[:, 0] == Kind.BACKWARD)
    weights = order[backward]
    weights[:, 0] = Kind.BACKWARD_WEIGHT
    order = order.copy()
    order[backward, 0] = Kind.BACKWARD_INPUT

    after = np.full(len(backward), len(order))
    num_in_turns = max(len(backward) - num_held, 0)
    after[:num_in_turns] = backward[num_held:] + 1
    return np.insert(order, after, weights, axis=0)
