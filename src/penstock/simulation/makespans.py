"""Makespans of many schedules of one shape: what a search evaluates again and again.

All that does not depend on the order is prepared once: the seconds of each action, the lag of each message, and which
actions each one waits for. An order only says in which row each action is, so no schedule is lowered or indexed anew.
"""

from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, ScheduleError, described
from penstock.ir.deps import NONE, NUM_PREDECESSORS, predecessors
from penstock.ir.operations import IS_COMPUTE, Kind, Op, exclusive
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.ir.walk import walk
from penstock.simulation.channels import Lags
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import message_costs
from penstock.simulation.durations import seconds_of_ops, seconds_of_rows, start_after_launch
from penstock.simulation.engine import require_costs, simulate

PLANES = sorted({exclusive(Op(kind)) for kind in Kind})
PLANE_OF_OP = np.array([PLANES.index(exclusive(op)) if IS_COMPUTE[op] else NONE for op in Op])
"""[num_ops] the index among `PLANES`, or `NONE`; operations that exclude each other, such as B and I, share a plane."""


class Makespans:
    """Evaluates schedules that have the placement, the microbatches and the slices of one of them."""

    def __init__(self, like: Schedule, costs: Costs) -> None:
        """Prepare for schedules like this one; the first evaluation may compile for some seconds.

        Raises:
            ConfigError: for anything but a schedule and costs that fit it.
        """
        _require_schedule(like, "like")
        require_costs(costs)
        self._costs = costs
        self._shape = (like.placement, like.num_microbatches, like.num_slices)
        self._is_serialized = bool(message_costs(like.placement, costs).is_exclusive.any())
        self._lags = Lags.of(like, costs)
        self._seconds = seconds_of_ops(like, costs)
        self._waits = _waits(like)

    def of(self, schedule: Schedule) -> float:
        """Return the seconds that `simulate` predicts from the first start to the last end; inf if it cannot run.

        Raises:
            ScheduleError: if the schedule has another shape.
            ConfigError: if the costs do not know a kind that the schedule runs, or for anything but a schedule.
        """
        _require_schedule(schedule, "schedule")
        if (schedule.placement, schedule.num_microbatches, schedule.num_slices) != self._shape:
            raise ScheduleError(
                f"{schedule.name}: its placement, microbatches or slices differ from those of the schedule that these "
                "makespans were prepared for; prepare others for it"
            )
        if self._is_serialized:
            return self._simulated(schedule)
        costs = self._costs
        seconds = seconds_of_ops(schedule, costs) if costs.split_forward_s else self._seconds
        times = walk(
            schedule.offsets,
            self._predecessors(schedule),
            schedule.joined,
            seconds_of_rows(schedule, costs, seconds),
            lag=self._lags.of_rows(schedule).reshape(-1, 1),
            compiled=True,
        )
        if not times.is_complete:
            return inf
        start_after_launch(schedule, costs, times.start)
        makespan_s = float(times.end.max() - times.start.min()) if schedule.num_rows else 0.0
        return makespan_s if isfinite(makespan_s) else self._simulated(schedule)  # which raises, and says why

    def _simulated(self, schedule: Schedule) -> float:
        """Return the makespan that the simulator predicts, inf where the schedule cannot run."""
        try:
            return simulate(schedule, self._costs, compiled=True).makespan_s
        except ScheduleError:  # it cannot run to its end
            return inf

    def _predecessors(self, schedule: Schedule) -> NDArray[np.int32]:
        """[num_rows, n] the rows that each row waits for, as `deps.predecessors` would return them."""
        places = _places(schedule)
        # The last place stands for none: no action has it, so it stays `NONE`.
        row_of_place = np.full(len(self._waits), NONE, np.int32)
        row_of_place[places] = np.arange(len(places))
        return np.asarray(row_of_place[self._waits[places]])


def _require_schedule(schedule: object, key: str) -> None:
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"{described(schedule)}; expected a Schedule", key=key)


def _places(table: Table) -> NDArray[np.int64]:
    """[num_rows] the place of each action: a number for its plane, stage, microbatch and slice, whatever the order."""
    place = PLANE_OF_OP[table.op] * table.num_stages + table.stage
    place *= table.num_microbatches
    place += table.microbatch
    place *= table.num_slices
    place += table.slice
    return np.asarray(place)


def _waits(like: Schedule) -> NDArray[np.int64]:
    """[num_places + 1, n] the places that the action of each place waits for; the last place stands for no action."""
    # An action waits for the same actions in every order of a shape; only the rows of these differ. So they are found
    # once, in a schedule that has an action of each plane, and noted as places, which no order changes. B and I exclude
    # each other and have one place: a W, or a backward of the stage before, waits for the one that runs. A place whose
    # action does not run has no row, so nothing waits for it. A message adds a lag to one of these waits, and no other
    # wait. On a serialized link the order of messages counts too; there `simulate` evaluates the schedule.
    sizes = range(like.num_microbatches), range(like.num_slices)
    orders = [
        np.stack(np.meshgrid(PLANES, stages, *sizes, indexing="ij"), axis=-1).reshape(-1, 4)
        for stages in like.placement.stages_of_rank
    ]
    complete = Schedule.from_arrays(
        "every action", like.placement, orders, num_microbatches=like.num_microbatches, num_slices=like.num_slices
    )
    places = _places(complete)
    no_place = len(places)
    waits = np.full((no_place + 1, NUM_PREDECESSORS), no_place, np.int64)
    # `NONE` is -1, the index of the last entry here: `no_place`.
    waits[places] = np.append(places, no_place)[predecessors(complete)]
    # A backward waits for its R; where none runs, for what the R would wait for, the F. A forward gets what its earlier
    # slice waits for, which changes nothing.
    waits = np.column_stack([waits, waits[waits[:, 1], 0]])
    return np.asarray(waits[:, (waits != no_place).any(axis=0)])
