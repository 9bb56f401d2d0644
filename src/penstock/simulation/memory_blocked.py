"""Since when memory blocked a rank: it held as many activations as allowed, and a later forward could have run.

limit 2    F0  F1  .   .   B0  F2          F2's input is there at [1]: from then on, only memory keeps
                      [1]                  the rank from running it
"""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.deps import NONE, predecessors
from penstock.ir.live import live_activations
from penstock.ir.operations import BEGINS_KEEPING, IS_RECEIVE
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import Block
from penstock.simulation.channels import Lags
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import message_costs

NEVER = inf


def memory_blocked_since_s(
    timeline: Timeline, costs: Costs, blocks: Sequence[Block], memory_limit: int | Sequence[int] | None
) -> list[float]:
    """Return, per block, since when memory kept its rank from running a forward instead of waiting; else `NEVER`.

    Raises:
        ConfigError: if there are neither as many limits as ranks nor a single one, or one is no whole number.
    """
    if memory_limit is None:
        return [NEVER] * len(blocks)
    limits = _per_rank(memory_limit, timeline.num_ranks)
    is_forward = BEGINS_KEEPING[timeline.program.op]
    live = live_activations(timeline.program)
    ready_s = _ready_s(timeline, costs)
    found = [NEVER] * len(blocks)
    earliest_s = [NEVER] * timeline.num_ranks
    for index in reversed(range(len(blocks))):
        block = blocks[index]
        forwards = [row for row in block.rows if is_forward[row]]
        if not forwards and live[block.row] >= limits[block.rank]:
            found[index] = earliest_s[block.rank]
        earliest_s[block.rank] = min([earliest_s[block.rank], *(float(ready_s[row]) for row in forwards)])
    return found


def _ready_s(timeline: Timeline, costs: Costs) -> NDArray[np.float64]:
    """[num_instructions] when a forward could have run at the earliest, after what it waits for."""
    program = timeline.program
    before = predecessors(program)
    lags = Lags.of(
        program.placement,
        message_costs(program.placement, costs),
        costs.per_microbatch("microbatch_bytes_factor", program.num_microbatches),
    )
    is_receive = IS_RECEIVE[program.op]
    # A receive may have been posted long after its message could have come: the send counts.
    known_s = timeline.end_s.copy()
    known_s[is_receive] = timeline.end_s[before[is_receive, 0]] + lags.of_rows(program)[is_receive]
    return np.asarray(np.where(before == NONE, -inf, known_s[before]).max(axis=1))


def _per_rank(limit: int | Sequence[int], num_ranks: int) -> Sequence[int]:
    limits = limit if isinstance(limit, Sequence) and not isinstance(limit, str) else [limit] * num_ranks
    wrong = [each for each in limits if isinstance(each, bool) or not isinstance(each, int | np.integer) or each < 0]
    if wrong:
        raise ConfigError(f"{described(wrong[0])}; give whole numbers of 0 or more", key="memory_limit")
    if len(limits) != num_ranks:
        raise ConfigError(f"{len(limits)} values for {num_ranks} ranks; give one, or one per rank", key="memory_limit")
    return limits
