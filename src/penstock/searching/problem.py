"""A search's problem: what each action of a pipeline takes, waits for and holds, as columns by the action's number.

    number of an action = (plane x stages + stage) x microbatches + microbatch        planes are F, I and W

Seconds, lags and bytes are those of the simulator and of the model of memory, of a schedule that runs every action.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, predecessors
from penstock.ir.hot import Hot
from penstock.ir.live import changes_of_rows, one_each
from penstock.ir.operations import Kind
from penstock.ir.recompute import with_recompute
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.simulation.channels import Lags, Wires
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import message_costs
from penstock.simulation.durations import seconds_of_ops, seconds_of_rows

PLANES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
FORWARD, INPUT, WEIGHT = range(len(PLANES))
NUM_PLANES = len(PLANES)
NO_LIMIT = int(np.iinfo(np.int64).max)

Ints = NDArray[np.int32]
Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The actions that a search orders; each column but `limit` has an entry per action."""

    placement: Placement
    num_microbatches: int
    rank: Ints
    seconds: Seconds
    """Seconds for which the action keeps its rank busy."""
    source: Ints
    """The action, on any rank, whose result the action takes; `NONE` where it takes no result."""
    activation_source: Ints
    """The F, on the same rank, whose activation an I takes; `NONE` for other actions."""
    lag_s: Seconds
    """Seconds from the end of the source, or from when its message has left a serialized link, until it may start."""
    link: Ints
    """The serialized link that the action's result leaves by, one message at a time; `NONE` where there is none."""
    wire_s: Seconds
    """Seconds that the result takes on its serialized link."""
    taken_bytes: Bytes
    """Bytes that the rank holds from the action's start on, the action's workspace among them."""
    freed_bytes: Bytes
    """Bytes that the rank frees at the action's end."""
    room_bytes: Bytes
    """Bytes that have to be free for the action; before an F, so many that a backward finds its workspace behind it."""
    limit: Bytes
    """[num_ranks] the most bytes that each rank may hold."""
    launch_s: float
    """The seconds of a launch, which runs before an action starts and counts among the action's seconds."""
    recomputed_stages: tuple[int, ...] = ()
    """The stages whose forwards run again, each right before its I, which counts the seconds of both."""

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
        """Return the entries of one plane of a column, as [num_stages, num_microbatches]."""
        size = self.num_stages * self.num_microbatches
        return column[plane * size : (plane + 1) * size].reshape(self.num_stages, self.num_microbatches)

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, costs: Costs, *, counts: bool = False) -> "Problem":
        """Return the problem of a placement under costs: all F, I and W of each stage and microbatch, without a limit.

        F is a forward, I an input gradient, W a weight gradient. `counts` measures memory in activations instead of
        bytes. Columns are made for the rows of a table of all actions, and then sorted by the actions' numbers.

        Raises:
            ConfigError: the costs are for another number of stages or microbatches, or do not know F, I and W.
        """
        # Make a table of all actions; `numbers` has the number of each row's action in the result.
        table = every_action(placement, num_microbatches)
        numbers = numbers_of_rows(table)
        # Find the sources of each row, the links of its result, and the bytes that it takes and frees.
        factors = costs.per_microbatch("microbatch_bytes_factor", num_microbatches)
        messages = message_costs(placement, costs)
        source_rows = predecessors(table)
        action_of_row = np.append(numbers, NONE).astype(np.int32)  # the last entry is for the row `NONE`
        wires = Wires.of(table, messages, factors)
        sizes = one_each(table) if counts else costs.stage_bytes(placement, num_microbatches)
        taken_bytes, freed_bytes = changes_of_rows(table, sizes)
        columns: dict[str, NDArray[Any]] = {
            "rank": table.rank_of_row,
            "seconds": seconds_of_rows(table, costs, seconds_of_ops(table, costs)),
            "source": action_of_row[source_rows[:, 0]],
            "activation_source": action_of_row[source_rows[:, 1]],
            "lag_s": Lags.of(table, costs).of_rows(table),
            "link": wires.link,
            "wire_s": wires.seconds,
            "taken_bytes": taken_bytes,
            "freed_bytes": freed_bytes,
        }
        # Sort all columns by the numbers of actions.
        row_of_action = np.argsort(numbers)
        limits = np.full(placement.num_ranks, NO_LIMIT, np.int64)
        by_action: dict[str, Any] = {
            name: np.ascontiguousarray(column[row_of_action]) for name, column in columns.items()
        }
        by_action["room_bytes"] = room_bytes(*(by_action[name] for name in ("rank", "taken_bytes", "freed_bytes")))
        return cls(placement, num_microbatches, limit=limits, launch_s=float(costs.launch_s), **by_action)

    def schedule(self, sequence: Ints, name: str) -> Schedule:
        """Return the schedule in which each rank runs its actions in the order of the sequence."""
        shape = (len(PLANES), self.num_stages, self.num_microbatches)
        plane, stage, microbatch = np.unravel_index(sequence, shape)
        rows = np.stack([np.array(PLANES)[plane], stage, microbatch], axis=1)
        orders = [rows[self.rank[sequence] == rank] for rank in range(self.num_ranks)]
        schedule = Schedule.from_arrays(name, self.placement, orders, num_microbatches=self.num_microbatches)
        return with_recompute(schedule, self.recomputed_stages) if self.recomputed_stages else schedule


def room_bytes(ranks: Ints, taken_bytes: Bytes, freed_bytes: Bytes) -> Bytes:
    """[num_actions] bytes that have to be free for each action, as `fill_room` finds them."""
    column = np.empty_like(taken_bytes)
    _ROOM(len(column), ranks, taken_bytes, freed_bytes, column, np.zeros(int(ranks.max()) + 1, np.int64))
    return column


def fill_room(ranks: Any, taken_bytes: Any, freed_bytes: Any, room: Any, largest_bytes: Any) -> None:
    """Fill in the bytes that have to be free for each action; `largest_bytes` [num_ranks] is written, too.

    Forwards that filled all memory would leave no backward the room for its workspace, and only a backward makes room.
    So an F needs what it keeps, and beside that the largest workspace of any backward of its rank.
    """
    num_forwards = len(ranks) // NUM_PLANES
    for rank in range(len(largest_bytes)):
        largest_bytes[rank] = 0
    for action in range(num_forwards, len(ranks)):
        room[action] = taken_bytes[action]
        largest_bytes[ranks[action]] = max(largest_bytes[ranks[action]], taken_bytes[action])
    for action in range(num_forwards):
        kept_bytes = taken_bytes[action] - freed_bytes[action]
        room[action] = max(taken_bytes[action], kept_bytes + largest_bytes[ranks[action]])


_ROOM = Hot(fill_room)


def numbers_of_rows(table: Schedule) -> NDArray[np.int64]:
    """Return the number of each row's action, [num_rows]; the table's backwards are split."""
    plane = np.zeros(int(max(Kind)) + 1, np.int64)
    plane[list(PLANES)] = range(len(PLANES))
    return np.asarray((plane[table.op] * table.num_stages + table.stage) * table.num_microbatches + table.microbatch)


def every_action(placement: Placement, num_microbatches: int) -> Schedule:
    """Return a schedule of all actions, in an order that no rank could run."""
    orders: list[NDArray[np.int64]] = []
    for stages in placement.stages_of_rank:
        grid = np.meshgrid(PLANES, stages, range(num_microbatches), indexing="ij")
        orders.append(np.stack(grid, axis=-1).reshape(-1, 3))
    return Schedule.from_arrays("every action", placement, orders, num_microbatches=num_microbatches)
