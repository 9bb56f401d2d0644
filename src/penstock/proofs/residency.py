"""Proof: no more stages of a rank are whole at once than may be, of those that are gathered.

0UNSHARD 0F0 1UNSHARD 1F0 0RESHARD 1RESHARD      two are whole while 1F0 runs
"""

import numpy as np

from penstock.ir.program import Program
from penstock.ir.whole import num_whole, peak_whole
from penstock.proofs.report import Findings, first_of_each


def check_residency(program: Program, residency: int | None, findings: Findings) -> list[int] | None:
    """Return the most units of each rank that are whole at once, those being gathered included; None without gathers.

    Note the first row of each rank at which there are more than `residency`; None allows any number.
    """
    peaks = peak_whole(program)
    if peaks is not None and residency is not None and max(peaks) > residency:
        whole = num_whole(program)
        over = np.flatnonzero(whole > residency)
        for row in first_of_each(program.rank_of_row[over], over):
            problem = f"makes {whole[row]} stages whole at once; rank {program.rank_of_row[row]} may have {residency}"
            findings.add(row, problem, "Reshard one of them before it, or raise residency")
    return peaks
