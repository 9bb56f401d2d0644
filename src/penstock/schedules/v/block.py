"""From the building block of a family to its schedule."""

from collections.abc import Callable

from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Generate, Shape
from penstock.schedules.options import Options
from penstock.schedules.v.reorder import move_earlier, move_end_earlier, move_whole_earlier
from penstock.schedules.v.slots import (
    Ints,
    Slots,
    fill_weights,
    fill_weights_by_stage,
    repeat,
    squeeze,
    to_orders,
    widen_backwards,
    without_weights,
)

Block = Callable[[int], Ints]
"""From the number of ranks to [num_ranks, 4] the slots of the four passes of microbatch 0."""


def split_schedule(name: str, block: Block) -> Generate:
    """Return what makes the schedule of a block with split backwards."""

    def slots(repeated: Slots) -> Slots:
        started = without_weights(squeeze(move_earlier(fill_weights(repeated))))
        # Other slots are idle now, so weight gradients fill them anew; then those of each stage are in order.
        ended = without_weights(squeeze(fill_weights(move_end_earlier(started))))
        return fill_weights_by_stage(ended)

    return _generate(name, block, slots)


def whole_schedule(name: str, block: Block) -> Generate:
    """Return what makes the schedule of a block with whole backwards, of which it names the first of two slots."""
    return _generate(name, block, lambda repeated: move_whole_earlier(widen_backwards(repeated)))


def _generate(name: str, block: Block, slots: Callable[[Slots], Slots]) -> Generate:
    def generate(shape: Shape, options: Options) -> Schedule:
        orders = to_orders(slots(repeat(block(shape.num_ranks), shape.num_microbatches)))
        placement = Placement.vee(shape.num_ranks)
        return Schedule.from_arrays(name, placement, orders, num_microbatches=shape.num_microbatches)

    return generate
