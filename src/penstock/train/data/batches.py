"""Batches on the way to a rank's steps: as much of each as its stages take, prepared ahead in a thread.

    thread   batch 0   batch 1   batch 2   waits            batch 3
    step               run 0 ────────────► run 1 ─────────► run 2

A batch depends on its number alone, or comes from an iterator in order, so which thread prepares it changes no bit.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread

from penstock.errors import PenstockError
from penstock.execute.batch.stream import Part
from penstock.pipeline import Pipeline
from penstock.running_time import wait_in_parts

Batch = Part
"""Inputs, target and keywords of one batch; parts that no stage of the rank takes are left out."""


LONGEST_END_S = 5.0
"""How long the end of a run waits for a batch that is being read."""


@dataclass(frozen=True, slots=True)
class Wants:
    """The parts of a batch that a rank's stages take, and the replica whose rows it takes; nothing else is read for it.

    The replicas share out the rows in order. Where the rows do not divide, the first replicas have one more.
    """

    inputs: bool = True
    target: bool = True
    replica: int = 0
    num_replicas: int = 1

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Wants":
        """Look at the stages of a rank: the first one of a route takes inputs, the last one the target."""
        placement = pipeline.schedule.placement
        stages = placement.stages_of_rank[pipeline.rank]
        return cls(
            inputs=any(placement.previous_stage[stage] < 0 for stage in stages),
            target=any(placement.next_stage[stage] < 0 for stage in stages),
            replica=pipeline.replica,
            num_replicas=pipeline.num_replicas,
        )

    def rows_of(self, size: int) -> slice:
        """Return the rows of the replica in a batch of `size` rows."""
        rows_per_replica, num_longer = divmod(size, self.num_replicas)
        first_row = self.replica * rows_per_replica + min(self.replica, num_longer)
        return slice(first_row, first_row + rows_per_replica + (self.replica < num_longer))


class BatchReader:
    """Reads the batches of a run in order, some of them ahead in a thread; it stands for those of a step.

    An error in the thread is raised by `get` for that batch; the thread ends with `close`, or with the process.
    """

    def __init__(
        self, read: Callable[[int], Batch], first: int, end: int, *, num_ahead: int, limit_s: float = 60.0
    ) -> None:
        """Read batches from number `first` up to, and without, `end`; each once.

        `num_ahead` are prepared while a step runs; with 0 there is no thread. `limit_s` is how long `get` waits.
        """
        self._read = read
        self._limit_s = limit_s
        self._following = first
        self._used: dict[int, Batch] = {}
        self._step = range(0)
        self._changed = Condition()
        self._ready: deque[Batch | BaseException] = deque()
        self._is_closed = False
        self._num_ahead = num_ahead
        self._thread: Thread | None = None
        if num_ahead and first < end:
            self._thread = Thread(target=self._work, args=(first, end), name="penstock-data", daemon=True)
            self._thread.start()

    def begin(self, first: int, count: int) -> None:
        """Begin a step of so many batches from this number on; the batches before it are not needed any more."""
        self._used = {number: batch for number, batch in self._used.items() if number >= first}
        self._step = range(first, first + count)

    def __len__(self) -> int:
        return len(self._step)

    def __getitem__(self, index: int) -> Batch:
        return self.get(self._step[index])

    def get(self, number: int) -> Batch:
        """Return the next batch, or again one of this step.

        Raises:
            PenstockError: it cannot be read, or takes longer than the limit.
        """
        for following in range(self._following, number + 1):
            self._used[following] = self._next(following)
            self._following = following + 1
        return self._used[number]

    def close(self) -> None:
        """End the thread; what it has read is forgotten."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LONGEST_END_S)  # a source that is stuck is left behind

    def _next(self, number: int) -> Batch:
        if self._thread is None:
            return self._read(number)
        with self._changed:
            if not wait_in_parts(partial(self._changed.wait_for, lambda: self._ready), self._limit_s):
                raise PenstockError(
                    f"batch {number} was not ready after {self._limit_s:g} s (run.deadline_s); see to the disk or the "
                    "source of the data, or raise it"
                )
            batch_or_error = self._ready[0]
            if isinstance(batch_or_error, BaseException):
                raise batch_or_error  # it stays in the queue, for a later `get` would wait for a thread that has ended
            self._ready.popleft()
            self._changed.notify_all()
        return batch_or_error

    def _work(self, first: int, end: int) -> None:
        for number in itertools.takewhile(self._has_room, range(first, end)):
            batch_or_error: Batch | BaseException
            try:
                batch_or_error = self._read(number)
            except BaseException as error:
                batch_or_error = error
            with self._changed:
                self._ready.append(batch_or_error)
                self._changed.notify_all()
            if isinstance(batch_or_error, BaseException):
                return

    def _has_room(self, _: int) -> bool:
        """Wait until another batch is to be read; say no where none is any more."""
        with self._changed:
            # The thread waits as long as a step or an evaluation takes; `close` wakes it.
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._num_ahead)
            return not self._is_closed
