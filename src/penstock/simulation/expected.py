"""How long a block of computation takes according to the costs: on its own stage, and on the mean stage."""

from dataclasses import replace

import numpy as np

from penstock.ir.program import Program
from penstock.simulation.blocks import Block
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import durations_s


class ExpectedDurations:
    """What costs say about the blocks of a program's timelines; launches come before a block and are no part of it."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program = program
        self._launch_s = costs.launch_s
        self._duration_s = durations_s(program, replace(costs, launch_s=0.0))
        factors = costs.per_microbatch("microbatch_compute_factor", program.num_microbatches)
        self._mean_s = costs.durations_s(program.num_stages).mean(axis=1) * factors.mean()
        self._overlap_factor = costs.overlap_factor

    def on_its_stage_s(self, block: Block) -> float:
        """Seconds for this stage and microbatch."""
        return float(self._duration_s[block.row : block.row + block.num_rows].sum())

    def on_the_mean_stage_s(self, block: Block) -> float:
        """Seconds for the mean stage and microbatch."""
        factor = self._overlap_factor if block.num_rows > 1 else 1.0
        return float(factor * np.sum(self._mean_s[self._program.op[list(block.rows)]]))

    def launches_s(self, block: Block, num_instructions: int) -> float:
        """Seconds that the host needs for so many instructions before a block, and for the block itself."""
        return (num_instructions + block.num_rows) * self._launch_s
