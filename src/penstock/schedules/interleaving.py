"""Interleaving: the turns in which the families over a loop of stages run forwards and backwards.

Microbatches go in groups, and a group runs on the stages of a rank one after the other. That gives each forward a
*turn*; the backwards have the same turns, with the stages the other way round. Two stages per rank, a and b, and five
microbatches in groups of three:

    turn       0  1  2  3  4  5  6  7  8  9
    forward   a0 a1 a2 b0 b1 b2 a3 a4 b3 b4
    backward  b0 b1 b2 a0 a1 a2 b3 b4 a3 a4

A rank warms up with the forwards of the first w turns, then runs forward w+k and backward k in turn (Megatron-LM, arXiv
2104.04473). Its warm-up ends when the first microbatch is on its last stage, and `head_start` turns later for each rank
that comes after it. A head start of 2 leaves messages time to travel, but a microbatch is back on rank 0 after p turns
only, so that groups need p microbatches, or ranks wait for each other without end. With 1 it is back after p/2 turns.

The rest makes this right for all numbers of ranks, stages and microbatches:

1. A last group shorter than the others keeps turns for p microbatches (or as many as the others have), some of them
   empty. Leaving microbatches out of an order that can run leaves an order that can run; so does leaving out the last
   stages, where their number is no multiple of p.
2. Groups below p/2 come to their next stage when p/2 turns have passed, at the first place that the other groups leave
   free (PipeOffload, arXiv 2503.01328).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Shape
from penstock.schedules.options import Options

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Groups:
    """Microbatches in groups: how many each has, and how many turns it takes on a stage."""

    sizes: Ints
    num_places: Ints

    @classmethod
    def chosen(cls, options: Options, shape: Shape) -> "Groups":
        """Take the option `group`; where it is not given, the groups are even."""
        if "group" in options.given:
            return cls.of_size(options.number("group", shape.num_ranks), shape)
        return cls.even(shape)

    @classmethod
    def even(cls, shape: Shape) -> "Groups":
        """Cut into as many groups as have a microbatch for each rank, as equal as can be, larger ones first."""
        num_groups = max(1, shape.num_microbatches // shape.num_ranks)
        least, num_larger = divmod(shape.num_microbatches, num_groups)
        sizes = least + (np.arange(num_groups) < num_larger)
        return cls(sizes, sizes)

    @classmethod
    def of_size(cls, size: int, shape: Shape) -> "Groups":
        """Cut into groups of `size`; the last may be shorter, and then keeps a place for each rank, up to `size`."""
        size = min(size, shape.num_microbatches)
        num_full, num_left = divmod(shape.num_microbatches, size)
        sizes = np.array([size] * num_full + [num_left] * (num_left > 0))
        num_places = np.maximum(sizes, min(size, shape.num_ranks))
        return cls(sizes, num_places)


@dataclass(frozen=True, slots=True)
class Turns:
    """Forwards of one rank: the turn, the stage counted on the rank alone, and the microbatch of each."""

    turn: Ints
    local_stage: Ints
    microbatch: Ints

    @classmethod
    def take(cls, groups: Groups, num_local_stages: int, least_gap: int) -> "Turns":
        """Give each forward its turn; a group comes to its next stage after `least_gap` turns or more.

        A single group needs no gap: the only forwards behind its backwards are those of the rank's last stage.
        """
        is_short = len(groups.sizes) > 1 and groups.num_places[0] < least_gap
        rounds = -(-least_gap // int(groups.num_places[0])) if is_short else 1
        first_place = _first_places(num_local_stages, rounds)
        group_of = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
        microbatch = np.arange(len(group_of))
        place = microbatch - (np.cumsum(groups.sizes) - groups.sizes)[group_of]
        num_before = (np.cumsum(groups.num_places) - groups.num_places)[group_of]

        turns = [num_local_stages * num_before + first * groups.num_places[group_of] + place for first in first_place]
        local_stage = np.repeat(np.arange(num_local_stages), len(microbatch))
        return cls(np.concatenate(turns), local_stage, np.tile(microbatch, num_local_stages))

    @property
    def until_last_stage(self) -> int:
        """The turn in which the first microbatch comes to the last stage of the rank."""
        return int(self.turn[self.local_stage == self.local_stage[-1]][0])

    @property
    def num_in_all(self) -> int:
        """How many turns there are up to the last forward, empty ones included."""
        return int(self.turn.max()) + 1

    def rows(self) -> NDArray[np.int32]:
        """[2 num_forwards, 3] all forwards, then the backward that has the same turn as each."""
        backward_stage = self.local_stage[-1] - self.local_stage
        kind = np.repeat([Kind.FORWARD, Kind.BACKWARD], len(self.turn))
        stage = np.concatenate([self.local_stage, backward_stage])
        return np.column_stack([kind, stage, np.tile(self.microbatch, 2)]).astype(np.int32)


def _first_places(num_local_stages: int, rounds: int) -> list[int]:
    """When a group comes to each stage, counted in groups: `rounds` later each time, or when a place is free.

    A new group begins every `num_local_stages` places, so places that differ by a multiple of it are the same.
    """
    first_places = [0]
    taken = {0}
    for _ in range(num_local_stages - 1):
        place = first_places[-1] + rounds
        while place % num_local_stages in taken:
            place += 1
        first_places.append(place)
        taken.add(place % num_local_stages)
    return first_places


def interleave(
    name: str,
    shape: Shape,
    groups: Groups,
    *,
    head_start: int,
    held_weights: int | None = None,
    all_forward_first: bool = False,
) -> Schedule:
    """Make the schedule of these groups, each rank `head_start` turns ahead of the next.

    `held_weights` splits the backwards: rank s runs its weight parts `held_weights` x s input parts late.
    """
    turns = Turns.take(groups, -(-shape.num_stages // shape.num_ranks), -(-shape.num_ranks // 2))
    rows = turns.rows()
    orders = []
    for rank in range(shape.num_ranks):
        head = turns.num_in_all if all_forward_first else head_start * (shape.num_ranks - 1 - rank)
        order = rows[_alternate(turns, turns.until_last_stage + head)]
        order[:, 1] = order[:, 1] * shape.num_ranks + rank
        order = order[order[:, 1] < shape.num_stages]
        if held_weights is not None:
            order = split_backwards(order, held_weights * rank)
        orders.append(order)
    is_line = shape.num_stages == shape.num_ranks
    placement = Placement.loop(shape.num_ranks, shape.num_stages, style="line" if is_line else "loop")
    return Schedule.from_arrays(name, placement, orders, num_microbatches=shape.num_microbatches)


def _alternate(turns: Turns, num_warmup: int) -> Ints:
    """[2 num_forwards] the order of `turns.rows()`: forwards of the warm-up, then forward w+k and backward k."""
    forward = np.where(turns.turn < num_warmup, turns.turn, 2 * turns.turn - num_warmup)
    backward = 2 * turns.turn + num_warmup + 1
    return np.argsort(np.concatenate([forward, backward]), kind="stable")


def split_backwards(order: NDArray[np.int32], num_held: int) -> NDArray[np.int32]:
    """Split each backward; the weight part of the k-th runs after the input part of the (k + num_held)-th, or last."""
    backward = np.flatnonzero(order[:, 0] == Kind.BACKWARD)
    weights = order[backward]
    weights[:, 0] = Kind.BACKWARD_WEIGHT
    order = order.copy()
    order[backward, 0] = Kind.BACKWARD_INPUT

    after = np.full(len(backward), len(order))
    num_in_turns = max(len(backward) - num_held, 0)
    after[:num_in_turns] = backward[num_held:] + 1
    return np.insert(order, after, weights, axis=0)
