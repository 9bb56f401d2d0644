"""Pass: move what some stages keep of their forwards to the host, and back ahead of the row that reads it.

    Before: 0F0 0F1 0F2 0F3 0B0 0B1 ...
    After:  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0RELOAD1 0B0 0B1 ...

RELOAD comes early, so that its copy runs under computations; an overlapped pair counts once, and nothing is put into
it. Where no computation would be left before it, the backward follows so soon that nothing is gained.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, ScheduleError, described
from penstock.ir.deps import NONE, index_rows
from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program
from penstock.ir.recompute import chosen_stages


def add_offloads(program: Program, stages: Iterable[int], ahead: int = 1) -> Program:
    """Add an OFFLOAD and a RELOAD per microbatch: activations of these stages wait on the host for their backward.

    The OFFLOAD comes after the forward, and the RELOAD starts `ahead` computations before the first row that reads the
    activation. Without a whole computation between the forward and the RELOAD, the activation stays on the device.

    Raises:
        ConfigError: for a stage that the program does not have, and for anything but 0 or more computations `ahead`.
        ScheduleError: for a program without a backward.
    """
    chosen = chosen_stages(program, stages, key="offload")
    if isinstance(ahead, bool) or not isinstance(ahead, int | np.integer) or ahead < 0:
        raise ConfigError(f"{described(ahead)}; expected a number of computations, 0 or more", key="ahead")
    if not chosen.any():
        return program
    if program.is_forward_only:
        problem = "it has no backward, so no stage keeps anything that could be offloaded"
        raise ScheduleError(f"{program.name}: {problem}; leave out offload, or give a schedule with backwards")
    forward_row, reader_row = _forwards_and_readers(program, chosen)
    # Count computations, an overlapped pair as one; `first_row` is the row at which each begins.
    begins = program.is_compute & ~np.append(False, program.joined[:-1])
    first_row, computation_of_row = np.flatnonzero(begins), np.cumsum(begins) - 1
    computation_after_reload = computation_of_row[reader_row] - ahead
    is_far = computation_after_reload - computation_of_row[forward_row] >= 2
    forward_row, reload_row = forward_row[is_far], first_row[computation_after_reload[is_far]]
    # Insert both copies: the first half of the new rows are OFFLOADs, the second half RELOADs.
    row, op = np.tile(forward_row, 2), np.repeat([Op.OFFLOAD, Op.RELOAD], len(forward_row))
    key = np.concatenate([NewRows.after(forward_row + program.joined[forward_row]), NewRows.before(reload_row)])
    rank, stage = program.rank_of_row[row], program.stage[row]
    return program.inserted(NewRows(key, rank, op, stage, program.microbatch[row], program.slice[row], stage))


def _forwards_and_readers(program: Program, chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the rows of the chosen stages' forwards, and the rows that first read what these keep: R, else B or I."""
    index = index_rows(program)
    recompute, backward = index.plane(Op.RECOMPUTE)[chosen], index.plane(Op.BACKWARD)[chosen]
    forward, reader = index.plane(Op.FORWARD)[chosen], np.where(recompute != NONE, recompute, backward)
    has_both = (forward != NONE) & (reader != NONE)
    return forward[has_both], reader[has_both]
