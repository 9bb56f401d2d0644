"""Sweeps: constructions that give every rank one F and one I in turn, and put W where ranks would idle.

common      what both share: running an action, and filling the time before it with W
line        one stage a rank: the zero-bubble scheduler (arXiv 2401.10241, section 3.1)
vee         two stages a rank in a V: the scheduler of ZB-V (arXiv 2401.10241, section 6)
"""

from collections.abc import Iterator

from penstock.placement import Placement
from penstock.searching.problem import Ints, Problem
from penstock.searching.sweeps.line import line_sweeps
from penstock.searching.sweeps.vee import vee_sweeps


def sequences_of_sweeps(problem: Problem) -> Iterator[Ints | None]:
    """Yield the sequence of each setting, None where it finds no way within the limit; none for other placements."""
    placement = problem.placement
    if placement == Placement.line(problem.num_ranks):
        yield from line_sweeps(problem)
    elif problem.num_ranks > 1 and placement == Placement.vee(problem.num_ranks):
        yield from vee_sweeps(problem)
