"""`zbv`: two stages per rank in a V, backwards in two parts, in the memory of 1F1B (arXiv 2401.10241, section 6).

3 ranks, 5 microbatches: the order of each rank

0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 0I2 0W2 0I3 0W3 0I4 0W4
1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1I1 1W1 4F4 4I3 4W3 1I2 4I4 1I3 1W2 1I4 1W3 4W4 1W4
2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2I2 3I3 2I3 3I4 2I4 2W2 3W3 3W4 2W3 2W4

A microbatch goes down the ranks through stages 0..p-1 and up again through p..2p-1, so that rank r holds stage r on the
way down and stage 2p-1-r on the way up. Each rank runs, with d for its stage on the way down and u for the other:

    2(p-r)-1 times  dF
    r times         uF dF
    p-r times       uF uI uW
    m-p times       dF dI dW uF uI uW       without dF once it has run out
    r times         dI uI
    p-r times       dI dW                   dW of the oldest microbatch
    then            the uW and the dW that are left

The counts need m >= 2p-1. Fewer microbatches run in the order of 2p-1 of which only the first m exist. This is the
fixed order of torch.distributed.pipelining; the paper searches for an order that suits given costs.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Options

Order = NDArray[np.int32]
FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def generate(shape: Shape, options: Options) -> Schedule:
    """Order every rank in the blocks above, and keep the microbatches that exist."""
    num_ranks, num_microbatches = shape.num_ranks, shape.num_microbatches
    orders = []
    for rank in range(num_ranks):
        order = _order(rank, num_ranks, max(num_microbatches, 2 * num_ranks - 1))
        keep = order[:, 2] < num_microbatches
        if shape.is_forward_only:
            keep &= order[:, 0] == FORWARD
        orders.append(order[keep])
    return Schedule.from_arrays("zbv", Placement.vee(num_ranks), orders, num_microbatches=num_microbatches)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Order:
    """[about 6 num_microbatches, 3] one rank's order; some forwards on the way down are of none that exists."""
    down, up = rank, 2 * num_ranks - 1 - rank
    num_behind = num_ranks - rank
    num_turns = num_microbatches - num_ranks
    num_ahead = 2 * num_behind - 1
    blocks = [
        _block(num_ahead, (FORWARD, down, 0)),
        _block(rank, (FORWARD, up, 0), (FORWARD, down, num_ahead)),
        _block(num_behind, (FORWARD, up, rank), (INPUT, up, 0), (WEIGHT, up, 0)),
        _block(
            num_turns,
            (FORWARD, down, num_ahead + rank),
            (INPUT, down, 0),
            (WEIGHT, down, 0),
            (FORWARD, up, num_ranks),
            (INPUT, up, num_behind),
            (WEIGHT, up, num_behind),
        ),
        _block(rank, (INPUT, down, num_turns), (INPUT, up, num_turns + num_behind)),
        _block(num_behind, (INPUT, down, num_turns + rank), (WEIGHT, down, num_turns)),
        _block(rank, (WEIGHT, up, num_turns + num_behind)),
        _block(rank, (WEIGHT, down, num_turns + num_behind)),
    ]
    return np.concatenate(blocks)


def _block(times: int, *actions: tuple[Kind, int, int]) -> Order:
    """Repeat actions, each a kind, a stage and the microbatch of the first time; each time is one microbatch on."""
    block = np.empty((times, len(actions), 3), np.int32)
    block[:] = actions
    block[:, :, 2] += np.arange(times, dtype=np.int32)[:, None]
    return block.reshape(-1, 3)


FAMILY = Family(
    name="zbv",
    summary="two stages per rank in a V, with delayed weight parts",
    source="Zero Bubble Pipeline Parallelism, arXiv 2401.10241; the order of torch.distributed.pipelining",
    placement="V",
    restrictions="two stages per rank; without a bubble from 2p-1 microbatches on",
    bubble="2(p-1)(B-W) by span and (p-1) max(B, 2(B-W)) by makespan from m = 2p-1 on, with W <= F <= B of one stage, "
    "B the input part",
    memory="min(2p, m + min(m, s+1)) of half a rank's layers each",
    advice="about half the bubble of zb-h2 in the memory of 1f1b, for twice the messages; rank 0 holds both ends",
    generate=generate,
    stages_per_rank=(2,),
    example=(3, 5),
)
