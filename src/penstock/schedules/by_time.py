"""Orders that follow from times: a family says when each action would run on a common clock, and ranks sort by it.

An action must have a later time than what it waits for, and no two actions of a rank the same: then the order can run.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind

Times = NDArray[np.int64]


def orders_by_time(
    stage: NDArray[Any], microbatch: NDArray[Any], forward: Times, backward: Times
) -> list[NDArray[np.int32]]:
    """Return per rank its rows of kind, stage and microbatch, by ascending time.

    The times are [num_ranks, ...], one entry per stage of the rank and microbatch; `stage` of a rank and `microbatch`
    broadcast to them.
    """
    orders = []
    for rank in range(len(forward)):
        rows = [
            np.stack(np.broadcast_arrays(kind, stage[rank], microbatch), axis=-1)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        order = np.argsort(np.stack([forward[rank], backward[rank]]), axis=None)
        orders.append(np.stack(rows).reshape(-1, 3)[order].astype(np.int32))
    return orders
