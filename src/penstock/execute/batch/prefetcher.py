"""`Prefetcher`: has the data of one step there when they are needed, and drops them after their last use.

pull      the microbatch is taken off its stream, and what the host has of it begins its way to the device
arrive    what is queued from now on may read it
release   it has been used
"""

from collections.abc import Sequence

from penstock.execute.batch.host_to_device import HostToDevice
from penstock.execute.batch.microbatch import Microbatch, without_data
from penstock.execute.batch.reader import DataTimes, Reader
from penstock.ir.timeline import DataWait


class Prefetcher:
    """The slices of each microbatch of a step, as far as they are there; `slices` is filled and emptied in place."""

    def __init__(
        self,
        slices: list[list[Microbatch]],
        source: Reader | None = None,
        *,
        microbatches: Sequence[Microbatch] = (),
        copies: HostToDevice | None = None,
    ) -> None:
        """Without a source, everything is there already: the slices are those of `microbatches`."""
        self._slices = slices
        self._source = source
        self._num_pulled = 0 if source is not None else len(slices)
        self._copies = copies
        self._host_microbatches = dict(enumerate(microbatches))
        """Microbatches that may still have to go to the device, by index."""
        if copies is not None:
            copies.begin(len(slices), microbatches)
        self.times = DataTimes() if source is None else source.times
        """The seconds that the data have cost so far."""
        self.waits: Sequence[DataWait] = () if source is None else source.waits
        """The waits of this rank for the data so far, on the clock of its stream's times."""

    def pull(self, microbatch: int) -> None:
        """Have the data of a microbatch, and of those before it; its own may be on their way. Again, do nothing."""
        while self._num_pulled <= microbatch:
            assert self._source is not None
            index = self._num_pulled
            data, self._slices[index] = self._source.next(index)
            if self._copies is not None:
                self._host_microbatches[index] = data
            self._num_pulled += 1
        if self._copies is not None and microbatch in self._host_microbatches:
            data = self._host_microbatches.pop(microbatch)
            self._slices[microbatch] = self._copies.copy(data, self._slices[microbatch])

    def arrive(self, microbatch: int) -> None:
        """Let the device wait for its copy of a microbatch that has been pulled: what follows may read it."""
        if self._copies is not None:
            self._copies.arrive(microbatch)

    def release(self, microbatch: int) -> None:
        """Drop the data of a microbatch; its sizes stay."""
        self._slices[microbatch] = [without_data(part) for part in self._slices[microbatch]]
