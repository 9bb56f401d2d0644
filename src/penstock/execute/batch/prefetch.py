"""The data of one step on one rank: pulled when they are needed, dropped after their last use (see `compile.data`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.stream import DataTimes
from penstock.ir.timeline import DataWait


class Source(Protocol):
    """Where the microbatches of a step come from that are not there yet."""

    times: DataTimes
    waits: list[DataWait]

    def next(self, index: int, /) -> list[Microbatch]:
        """Return the slices of the next microbatch, number `index` of the step."""
        ...


class Prefetcher:
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

    def release(self, microbatch: int) -> None:
        """Drop the data of a microbatch; its sizes stay."""
        self._slices[microbatch] = [without_data(each) for each in self._slices[microbatch]]


def without_data(microbatch: Microbatch) -> Microbatch:
    """Return a microbatch of the same number and size that holds nothing."""
    return replace(microbatch, args=(), kwargs={}, target=None)
