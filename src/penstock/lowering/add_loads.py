"""Pass: load what a stage takes of a batch right before the forward that needs it.

    Before: 0F0 0SEND_F0 0F1 0SEND_F1 ...
            1RECV_F0 1F0 1B0 1SEND_B0 ...
    After:  0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0SEND_F1 ...
            1RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 ...

The first stage of a route takes the inputs, and the last one the targets, as in DeepSpeed's engine. Without this pass a
rank loads what it needs while it would wait for a message.
"""

import numpy as np

from penstock.ir.deps import NONE, stages_at
from penstock.ir.operations import At, Op
from penstock.ir.program import NewRows, Program


def add_loads(program: Program) -> Program:
    """Add a LOAD in front of each forward of a stage at an end of its route; before a pair, if it is in one."""
    is_at_end = stages_at(program.placement, At.BATCH) != NONE
    forwards = np.flatnonzero((program.op == Op.FORWARD) & is_at_end[program.stage])
    first_of_pair = forwards - np.append(False, program.joined[:-1])[forwards]
    columns = (getattr(program, name)[forwards] for name in ("stage", "microbatch", "slice", "stage"))
    rank, load = program.rank_of_row[forwards], np.full_like(forwards, Op.LOAD)
    return program.inserted(NewRows(NewRows.before(first_of_pair), rank, load, *columns))
