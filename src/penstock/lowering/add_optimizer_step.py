"""Pass: end every rank with the optimizer step.

Before: 0F0 0B0 0REDUCE_GRAD
After:  0F0 0B0 0REDUCE_GRAD 0STEP
"""

import numpy as np

from penstock.ir.instruction import Op
from penstock.ir.program import NewRows, Program


def add_optimizer_step(program: Program) -> Program:
    """Add one STEP per rank, named after the rank's first stage; a forward-only program stays as it is."""
    if program.is_forward_only:
        return program
    ranks = np.arange(program.num_ranks)
    stages = np.array([stages_of_rank[0] for stages_of_rank in program.placement.stages_of_rank])
    zeros = np.zeros_like(ranks)
    step = np.full_like(ranks, Op.OPTIMIZER_STEP)
    return program.inserted(NewRows(NewRows.after(program.offsets[1:] - 1), ranks, step, stages, zeros, zeros, stages))
