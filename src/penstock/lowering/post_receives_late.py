"""Pass: post each receive right in front of its consumer, for messages that are launched in groups.

    Before: 1RECV_F3 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1F3
    After:  1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3 1F3

A send and the receive that comes back from the same neighbour are then between the same two computations, and launched
together: the batches of Megatron-LM and PiPPy under 1F1B. Not every schedule ends so, as a group waits for all of its
messages; the proof `coalesced` says which. A receive never moves past another one from the same rank.
"""

from itertools import pairwise

import numpy as np

from penstock.ir.operations import IS_MESSAGE, IS_RECEIVE
from penstock.ir.program import Program
from penstock.ir.table import Ints
from penstock.lowering.post_receives_ahead import Consumers


def post_receives_late(program: Program) -> Program:
    """Move receives toward the end of their rank."""
    consumers = Consumers(program)
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    orders = []
    for begin, end in pairwise(program.offsets.tolist()):
        rows = slice(begin, end)
        is_message, is_receive = IS_MESSAGE[program.op[rows]], IS_RECEIVE[program.op[rows]]
        # The place of a row that is no message is its number, an overlapped pair counted once; that of a message is the
        # number of the next such row.
        opens_place = ~is_message
        opens_place[1:] &= ~program.joined[begin : end - 1]
        place = np.cumsum(opens_place, dtype=np.int32) - ~is_message
        place_of_consumer = consumers.places(rows, place)
        for peer_rank in range(program.num_ranks):
            receives = np.flatnonzero(is_receive & (rank_of_stage.take(program.peer[rows], mode="clip") == peer_rank))
            place[receives] = _earliest_of_rest(place_of_consumer[receives])
        orders.append(np.lexsort((is_receive, ~is_message, place)))  # sends, receives, then the row of the place
    return program.reordered(orders)


def _earliest_of_rest(places: Ints) -> Ints:
    """[num_receives] the least of each place and all behind it."""
    return np.minimum.accumulate(places[::-1])[::-1]
