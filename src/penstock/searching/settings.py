"""The settings with which a search builds list schedules: how far ranks run ahead, and what comes first.

On a line, stage s of p has p - s microbatches under way under 1F1B, and 2 (p - s) - 1 under zb-h2 (arXiv 2401.10241);
what lies between them is tried too. Without a number, memory alone decides.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from penstock.searching.listing import Setting
from penstock.searching.problem import Ints, Problem

ANY_NUMBER = 1 << 30
TIMES_OF_1F1B = (1.0, 1.25, 1.5, 1.75, 2.0)
WAITS = (-ANY_NUMBER, 0.0, 0.25, 0.5, 1.0)
"""Shares of a W by which it may hold back what comes; far below 0, it runs where nothing else can."""


def settings_for(problem: Problem) -> Iterator[Setting]:
    """Yield settings that are the same on all ranks, those first that are best most often."""
    ranks = problem.num_ranks
    depths = (True,) if problem.num_stages == ranks else (True, False)
    for wait, most_under_way, prefers_inputs, deep_first in product(WAITS, _numbers(problem), (True, False), depths):
        waits = np.full(ranks, float(wait))
        yield Setting(most_under_way, np.full(ranks, prefers_inputs), waits, np.full(ranks, deep_first))


def _numbers(problem: Problem) -> list[Ints]:
    """Return the numbers of microbatches under way on each stage that are tried."""
    numbers = [np.full(problem.num_stages, ANY_NUMBER, np.int32)]
    if problem.num_stages == problem.num_ranks:
        under_1f1b = problem.num_ranks - np.array(problem.placement.rank_of_stage)
        numbers += [np.maximum(np.ceil(under_1f1b * times), 1).astype(np.int32) for times in TIMES_OF_1F1B]
        numbers.append((2 * under_1f1b - 1).astype(np.int32))
    return numbers
