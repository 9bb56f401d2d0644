"""The data of one step on one rank: pulled before the actions that need them, let go after the last of these.

The rule of pulling: the first microbatch comes with the agreement on the step. Each further one is pulled as soon as
the one before it has been used and this rank is about to wait for a message, at the latest right before the action that
needs it. So a pull takes time in which the rank would wait, or in which a device works off what it was given, and
delays no message that could leave before it. An action that needs a later microbatch pulls those before it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.stream import DataTimes
from penstock.execute.calls import Bound
from penstock.execute.stages.stage import Stage
from penstock.ir.operations import RUNS_FORWARD
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait


class Source(Protocol):
    """Where the microbatches of a step come from that are not there yet."""

    times: DataTimes
    waits: list[DataWait]

    def next(self, index: int, /) -> list[Microbatch]:
        """Return the slices of the next microbatch, number `index` of the step."""
        ...


class Supply:
    """The slices of each microbatch of a step, as far as they are there; `slices` is filled and emptied in place."""

    def __init__(self, slices: list[list[Microbatch]], source: Source | None = None) -> None:
        self._slices = slices
        self._source = source
        self._num_pulled = 0 if source is not None else len(slices)

    @property
    def times(self) -> DataTimes:
        """What the data have cost so far."""
        return DataTimes() if self._source is None else self._source.times

    @property
    def waits(self) -> Sequence[DataWait]:
        """When this rank waited for the data so far, on the clock of its stream's times."""
        return () if self._source is None else self._source.waits

    def pull(self, microbatch: int) -> None:
        """Have the data of a microbatch, and of those before it."""
        while self._num_pulled <= microbatch:
            assert self._source is not None
            index = self._num_pulled
            self._slices[index] = self._source.next(index)
            self._num_pulled += 1

    def let_go(self, microbatch: int) -> None:
        """Drop the data of a microbatch; its sizes stay."""
        self._slices[microbatch] = [without_data(each) for each in self._slices[microbatch]]

    def woven_into(self, bounds: Sequence[Bound], needs: Mapping[int, int]) -> list[Bound]:
        """Return a rank's calls with the pulls and releases; `needs` gives, per row that takes data, its microbatch."""
        pulls, releases = _moments(bounds, needs)
        woven: list[Bound] = []
        for position, bound in enumerate(bounds):
            woven += [Bound(bound.row, partial(self.pull, microbatch)) for microbatch in pulls.get(position, ())]
            woven.append(bound)
            if position in releases:
                woven.append(Bound(bound.row, partial(self.let_go, releases[position])))
        return woven


def without_data(microbatch: Microbatch) -> Microbatch:
    """Return a microbatch of the same number and size that holds nothing."""
    return replace(microbatch, args=(), kwargs={}, target=None)


def rows_that_take_data(program: Program, rows: range, stages: Mapping[int, Stage]) -> dict[int, int]:
    """Return, per row of a rank that may take something of the batch, its microbatch."""
    first, last = program.placement.previous_stage, program.placement.next_stage
    takes = {index for index, stage in stages.items() if first[index] < 0 or last[index] < 0 or stage.keyword_names()}
    forwards = (row for row in rows if RUNS_FORWARD[program.op[row]] and int(program.stage[row]) in takes)
    return {row: int(program.microbatch[row]) for row in forwards}


def _moments(bounds: Sequence[Bound], needs: Mapping[int, int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Before which call which microbatches are pulled, and after which one which is let go."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, bound in enumerate(bounds):
        if bound.row in needs:
            first.setdefault(needs[bound.row], position)
            last[needs[bound.row]] = position
    pulls: dict[int, list[int]] = {}
    used = -1
    for microbatch, position in first.items():
        waits = (at for at in range(used + 1, position) if bounds[at].receive_row is not None)
        pulls.setdefault(next(waits, position), []).append(microbatch)
        # The whole row: its first call may be the wait before it.
        used = position
        while used + 1 < len(bounds) and bounds[used + 1].row == bounds[position].row:
            used += 1
    return pulls, {position: microbatch for microbatch, position in last.items()}
