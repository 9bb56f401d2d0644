"""How long a block of computation takes according to the costs: on its own stage, and on the mean stage."""

import numpy as np

from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import Block
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import durations_s


class ExpectedDurations:
    """What costs say about the blocks of a timeline.

    In a predicted timeline the launch of a computation is part of it; a measured one starts when the launch is over.
    """

    def __init__(self, timeline: Timeline, costs: Costs) -> None:
        program = timeline.program
        self._program = program
        self._launch_s = costs.launch_s
        self._is_predicted = timeline.source == "predicted"
        self._duration_s = durations_s(program, costs) - (0.0 if self._is_predicted else costs.launch_s)
        factors = costs.per_microbatch("microbatch_compute_factor", program.num_microbatches)
        self._mean_s = costs.durations_s(program.num_stages).mean(axis=1) * factors.mean()
        self._overlap_factor = costs.overlap_factor

    def on_its_stage_s(self, block: Block) -> float:
        """Seconds for this stage and microbatch."""
        return float(self._duration_s[block.row : block.row + block.num_rows].sum())

    def on_the_mean_stage_s(self, block: Block) -> float:
        """Seconds for the mean stage and microbatch."""
        factor = self._overlap_factor if block.num_rows > 1 else 1.0
        launches_s = block.num_rows * self._launch_s if self._is_predicted else 0.0
        return float(factor * np.sum(self._mean_s[self._program.op[list(block.rows)]]) + launches_s)

    def launches_s(self, num_instructions: int) -> float:
        """Seconds that the host needs for so many instructions in front of a block, and for the block itself."""
        return (num_instructions if self._is_predicted else num_instructions + 1) * self._launch_s
