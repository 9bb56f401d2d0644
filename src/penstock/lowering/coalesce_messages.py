"""Pass: let a rank launch the messages between two of its computations together, as groups.

    Before: 1F2 1SEND_F2 1RECV_B0 1RECV_F3 1B0       group  0 0 0 0 0
    by rank: the same rows                           group  0 1 1 1 0
    by peer: the same rows                           group  0 1 1 2 0

By rank is one batch for all neighbours, as interleaving needs. By peer, a send and the receives of one neighbour are
launched together: the batches of Megatron-LM's `send_forward_recv_backward` and of PiPPy. One communicator then serves
both directions, where messages that are posted one by one need two: a receive that waits would hold up the sends behind
it in the queue of the device. The price is that nothing is posted ahead.

A message that nothing is launched with is a group by itself, so that the groups of a program are never in doubt.
"""

from itertools import pairwise

import numpy as np

from penstock.errors import require_choice
from penstock.ir.hot import Bools, Int32s, Int64s
from penstock.ir.operations import IS_MESSAGE
from penstock.ir.program import Program

BY_PEER, BY_RANK = WAYS = ("peer", "rank")


def coalesce_messages(program: Program, by: str = BY_RANK) -> Program:
    """Give the messages of a rank between two other rows one group, or with `by="peer"` one for each peer.

    `program` was lowered with `transport="coalesced"`, which places both ends of a message where its maker ends. The
    proof under that model says whether the groups can all end. Those of several peers are in the order of their first
    messages.

    Raises:
        ConfigError: for another way than `"peer"` or `"rank"`.
    """
    require_choice("by", by, WAYS)
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int64)
    orders, groups = [], []
    for begin, end in pairwise(program.offsets.tolist()):
        is_message = IS_MESSAGE[program.op[begin:end]]
        # Messages have the number of the last row before them that is none; those of one number and peer go together.
        place = np.cumsum(~is_message)
        peer_rank = rank_of_stage.take(program.peer[begin:end], mode="clip") if by == BY_PEER else 0
        first_row = np.arange(end - begin)
        _, first, queue = np.unique((place * program.num_ranks + peer_rank)[is_message], True, True)
        first_row[is_message] = np.flatnonzero(is_message)[first][queue]
        order = np.argsort(first_row, kind="stable")
        orders.append(order)
        groups.append(_numbered(first_row[order], is_message[order]))
    ungrouped = program.with_groups(np.zeros(program.num_rows, np.int32))
    return ungrouped.reordered(orders).with_groups(np.concatenate(groups))


def _numbered(first_row: Int64s, is_message: Bools) -> Int32s:
    """[num_rows] number from 1 the runs of messages with one `first_row`; 0 for all other rows."""
    begins = is_message & (np.diff(first_row, prepend=-1) != 0)
    return np.where(is_message, np.cumsum(begins), 0).astype(np.int32)
