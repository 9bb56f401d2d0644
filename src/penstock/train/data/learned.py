"""Token ids that say whether a loss counts them: one number for both, so that a token file holds them as it holds ids.

id         17   4   9
learned     0   1   1
marked     34   9  19      twice the id, and one more where it is learned
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]


def marked(ids: Ids, is_learned: NDArray[np.bool_]) -> Ids:
    """Return ids, each marked with whether it is learned."""
    return (ids << 1) | is_learned.astype(ids.dtype)


def ids_of(marked_ids: Ids) -> Ids:
    """Return the ids of marked ones."""
    return marked_ids >> 1


def is_learned(marked_ids: Ids) -> NDArray[np.bool_]:
    """Return whether each of some marked ids is learned."""
    return (marked_ids & 1).astype(bool)
