"""A measured step as it would have been had its data been there: blocks as long as they were, after what they need.

measured       [F0] |data of 1 ~~~~~~~| [F1]          |  is a pause, as long as it was
without        [F0] || [F1]                           and whatever waits for F1 begins earlier as well
"""

from collections.abc import Collection

from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import Block, blocks_of, in_order
from penstock.simulation.message_latency import with_unhindered_arrivals


def makespan_without_waits_s(timeline: Timeline, ranks: Collection[int]) -> float:
    """Return the seconds from the first start to the last end if these ranks had not waited for data."""
    blocks = blocks_of(with_unhindered_arrivals(timeline))
    begin_s = min((block.start_s for block in blocks), default=0.0)
    free_s = dict.fromkeys(range(timeline.num_ranks), begin_s)
    # How much earlier than measured each block would be over, and of each rank the one before.
    earlier_s = [0.0] * len(blocks)
    gained_s = dict.fromkeys(range(timeline.num_ranks), 0.0)
    for index in in_order(blocks, timeline.num_ranks):
        block = blocks[index]
        rank = block.rank
        ready = _ready(block, free_s[rank], gained_s[rank], earlier_s)
        if rank not in ranks:
            ready += [(min(wait.end_s, block.start_s), gained_s[rank]) for wait in block.data_waits]
        measured_s = max(moment_s for moment_s, _ in ready)
        instead_s = max(moment_s - gain_s for moment_s, gain_s in ready)
        own = block.data_waits if rank in ranks else ()
        waited_s = sum(max(min(wait.end_s, block.start_s) - max(wait.begin_s, measured_s), 0.0) for wait in own)
        earlier_s[index] = gained_s[rank] = measured_s - instead_s + waited_s
        free_s[rank] = block.end_s
    last_s = max((block.end_s - gain_s for block, gain_s in zip(blocks, earlier_s, strict=True)), default=0.0)
    return last_s - begin_s


def _ready(block: Block, free_s: float, gained_s: float, earlier_s: list[float]) -> list[tuple[float, float]]:
    """What a block begins after: when that was, and how much earlier it would be."""
    found = [(free_s, gained_s)]
    found += [(message.arrival_s, earlier_s[message.producer]) for message in block.messages]
    if block.gather is not None:
        found.append((block.gather.end_s, gained_s))
    found += [(min(reduction.end_s, block.start_s), gained_s) for reduction in block.reductions]
    return found
