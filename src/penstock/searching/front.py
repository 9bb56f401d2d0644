"""The Pareto front: of several plans, those that no other plan beats in every figure."""

from collections.abc import Sequence

import numpy as np


def pareto_front(figures: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the rows on the front, in order; in every column, smaller is better.

    A row is beaten by one that is no worse in any column and better in at least one: equal rows are all on the front.
    """
    values = np.array(figures, np.float64)
    front = []
    for index, row in enumerate(values):
        is_no_worse = (values <= row).all(axis=1)
        is_better = (values < row).any(axis=1)
        if not (is_no_worse & is_better).any():
            front.append(index)
    return front
