"""A measured step as it would have been without waits for data, or without reductions that held a rank up.

Blocks are as long as they were, and come after what they need:

measured       [F0] |data of 1 ~~~~~~~| [F1]          |  is a pause, as long as it was
without        [F0] || [F1]                           and whatever waits for F1 begins earlier as well
"""

from collections.abc import Collection

from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, Collective, blocks_of, in_order
from penstock.simulation.message_latency import with_unhindered_arrivals


def makespan_without_waits_s(timeline: Timeline, ranks: Collection[int], *, is_reducing: bool = True) -> float:
    """Return the seconds from the first start to the last end if these ranks had not waited for data.

    And, unless `is_reducing`, if no reduction had held up any rank.
    """
    blocks = blocks_of(with_unhindered_arrivals(timeline))
    begin_s = min((block.start_s for block in blocks), default=0.0)
    free_s = dict.fromkeys(range(timeline.num_ranks), begin_s)
    # How much earlier than measured each block would be over, and of each rank the one before.
    earlier_s = [0.0] * len(blocks)
    gained_s = dict.fromkeys(range(timeline.num_ranks), 0.0)
    for index in in_order(blocks, timeline.num_ranks):
        block = blocks[index]
        rank = block.rank
        left: list[DataWait | Collective] = []
        taken_out: list[DataWait | Collective] = []
        (taken_out if rank in ranks else left).extend(block.data_waits)
        (left if is_reducing else taken_out).extend(block.reductions)
        ready = _ready(block, free_s[rank], gained_s[rank], earlier_s)
        ready += [(min(wait.end_s, block.start_s), gained_s[rank]) for wait in left]
        measured_s = max(moment_s for moment_s, _ in ready)
        instead_s = max(moment_s - gain_s for moment_s, gain_s in ready)
        waited_s = _seconds_between(measured_s, block.start_s, taken_out)
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
    return found


def _seconds_between(begin_s: float, end_s: float, waits: Collection[DataWait | Collective]) -> float:
    """How long any of the waits lasted between two moments."""
    found_s = 0.0
    for wait in sorted(waits, key=lambda wait: wait.begin_s):
        found_s += max(min(wait.end_s, end_s) - max(wait.begin_s, begin_s), 0.0)
        begin_s = max(begin_s, wait.end_s)
    return found_s
