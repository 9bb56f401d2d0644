"""What waiting for replicas cost a recorded step: gathers and sums that held ranks up, and what is left behind the last
computation.

    rank 0   F0 F1 ~~~~ F2 B0 B1 B2 ######          ~ waits for the weights that its replicas gather
    rank 1   .. F0 F1 F2 B0 B1 B2 ####.             # waits for the sum of gradients over its replicas
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import Block, blocks_of


@dataclass(frozen=True, slots=True)
class ReplicaWaits:
    """Each of the rank that waited longest."""

    within_s: float
    """Between its computations."""
    within_rank: int
    behind_s: float
    """From the last computation of all ranks on: by so much the step is longer."""
    behind_rank: int


def replica_waits(timeline: Timeline) -> ReplicaWaits:
    """Find the waits for replicas in a measured timeline of one of them."""
    within_s = [0.0] * timeline.num_ranks
    free_s = [-np.inf] * timeline.num_ranks
    for block in blocks_of(timeline):
        within_s[block.rank] += _held_up_s(block, free_s[block.rank])
        free_s[block.rank] = block.end_s
    program = timeline.program
    rows = program.rows_of(REDUCES_REPLICAS)
    last_s = timeline.end_s[program.is_compute].max(initial=-np.inf)
    behind_s = np.zeros(timeline.num_ranks)
    np.maximum.at(behind_s, program.rank_of_row[rows], timeline.end_s[rows] - last_s)
    within_rank, behind_rank = int(np.argmax(within_s)), int(behind_s.argmax())
    return ReplicaWaits(within_s[within_rank], within_rank, float(behind_s[behind_rank]), behind_rank)


def _held_up_s(block: Block, free_s: float) -> float:
    """Seconds before a block in which its rank had all but the weights, or summed gradients."""
    reducing_s = sum(each.end_s - each.begin_s for each in block.reductions)
    if block.gather is None:
        return reducing_s
    ready_s = max([free_s, block.gather.begin_s, *(message.arrival_s for message in block.messages)])
    return reducing_s + max(min(block.gather.end_s, block.start_s) - ready_s, 0.0)
