"""A search's problem: what each action of a pipeline takes, waits for and holds, as columns by its number.

    number of an action = (plane x stages + stage) x microbatches + microbatch        planes are F, I and W

Seconds, lags and bytes are those of the simulator and of the model of memory, of a schedule that runs every action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, predecessors
from penstock.ir.live import changes_of_rows, one_each
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.simulation.channels import Lags, Wires
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import message_costs
from penstock.simulation.durations import seconds_of_ops, seconds_of_rows

PLANES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
FORWARD, INPUT, WEIGHT = range(len(PLANES))
NO_LIMIT = int(np.iinfo(np.int64).max)

Ints = NDArray[np.int32]
Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The actions that a search orders; columns have an entry for each."""

    placement: Placement
    num_microbatches: int
    rank: Ints
    seconds: Seconds
    """That its rank is busy."""
    source: Ints
    """The action whose result it takes, on any rank; `NONE` where it takes none."""
    saved: Ints
    """The action of its own rank that it waits for as well: the F of an I."""
    lag_s: Seconds
    """From the end of its source, or from when the message has left a serialized link, until it may start."""
    link: Ints
    """The serialized link that its result leaves by, one message at a time; `NONE` where it does not."""
    wire_s: Seconds
    """On that link."""
    taken: Bytes
    """That its rank holds from its start on."""
    freed: Bytes
    """That its rank holds no more behind its end."""
    limit: Bytes
    """[num_ranks] the most that each rank may hold."""
    launch_s: float
    """That belongs to the seconds of an action and runs before it starts."""

    @property
    def num_actions(self) -> int:
        return len(self.rank)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    def plane(self, column: NDArray[Any], plane: int) -> NDArray[Any]:
        """[num_stages, num_microbatches] the entries of one plane."""
        size = self.num_stages * self.num_microbatches
        return column[plane * size : (plane + 1) * size].reshape(self.num_stages, self.num_microbatches)

    @classmethod
    def of(
        cls,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        *,
        counts: bool = False,
    ) -> "Problem":
        """Take what the costs say of every action, without a limit; with `counts`, of activations in place of bytes.

        Raises:
            ConfigError: the costs are for another number of stages or microbatches, or do not know F, I and W.
        """
        table = every_action(placement, num_microbatches)
        numbers = numbers_of_rows(table)
        factors = costs.per_microbatch("microbatch_bytes_factor", num_microbatches)
        messages = message_costs(placement, costs)
        found = predecessors(table)
        action_of_row = np.append(numbers, NONE).astype(np.int32)  # the row `NONE` is the last entry
        wires = Wires.of(table, messages, factors)
        sizes = one_each(table) if counts else costs.stage_bytes(placement, num_microbatches)
        taken, freed = changes_of_rows(table, sizes)
        columns: dict[str, NDArray[Any]] = {
            "rank": table.rank_of_row,
            "seconds": seconds_of_rows(table, costs, seconds_of_ops(table, costs)),
            "source": action_of_row[found[:, 0]],
            "saved": action_of_row[found[:, 1]],
            "lag_s": Lags.of(table, costs).of_rows(table),
            "link": wires.link,
            "wire_s": wires.seconds,
            "taken": taken,
            "freed": freed,
        }
        row_of_action = np.argsort(numbers)
        limits = np.full(placement.num_ranks, NO_LIMIT, np.int64)
        own: dict[str, Any] = {name: np.ascontiguousarray(column[row_of_action]) for name, column in columns.items()}
        return cls(placement, num_microbatches, limit=limits, launch_s=float(costs.launch_s), **own)

    def schedule(self, sequence: Ints, name: str) -> Schedule:
        """Return the schedule in which each rank runs its actions in the order of the sequence."""
        size = self.num_stages * self.num_microbatches
        plane, rest = np.divmod(sequence.astype(np.int64), size)
        rows = np.stack([np.array(PLANES)[plane], rest // self.num_microbatches, rest % self.num_microbatches], axis=1)
        orders = [rows[self.rank[sequence] == rank] for rank in range(self.num_ranks)]
        return Schedule.from_arrays(name, self.placement, orders, num_microbatches=self.num_microbatches)


def numbers_of_rows(table: Schedule) -> NDArray[np.int64]:
    """[num_rows] the number of each row's action; its backwards are split."""
    plane = np.zeros(int(max(Kind)) + 1, np.int64)
    plane[list(PLANES)] = range(len(PLANES))
    found = plane[table.op] * table.num_stages + table.stage
    return np.asarray(found * table.num_microbatches + table.microbatch)


def every_action(placement: Placement, num_microbatches: int) -> Schedule:
    """Return a schedule of all of them, in an order that no rank could run."""
    orders = [_rows(stages, num_microbatches) for stages in placement.stages_of_rank]
    return Schedule.from_arrays("every action", placement, orders, num_microbatches=num_microbatches)


def _rows(stages: Sequence[int], num_microbatches: int) -> NDArray[np.int64]:
    grid = np.meshgrid(PLANES, stages, range(num_microbatches), indexing="ij")
    return np.asarray(np.stack(grid, axis=-1).reshape(-1, 3))
