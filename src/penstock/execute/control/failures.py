"""A rank whose step fails finds out why, tells the others, and makes a fresh start possible.

Each step begins here, afresh if the one before failed (part 1 of a step).

Guarantees: the watchdog's thread gives up messages of a step that is under way alone, never of a later one. Relies on:
messages may be given up by another thread than the step's own.
"""

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch.utils.checkpoint import CheckpointError

from penstock.errors import DeadlineExceeded, PeerLost, PipelineError
from penstock.execute.control.diagnosis import Cause, Describe, Verdict, diagnose, place_of, position_table
from penstock.execute.control.error_notes import noted_advice, noted_place
from penstock.execute.control.positions import (
    Failure,
    PositionBoard,
    RankPosition,
    departure_of,
    note_departure,
    read_all,
)
from penstock.execute.control.watchdog import Watchdog
from penstock.execute.transport.calls import calls_of
from penstock.execute.transport.device_queue import device_queue_of
from penstock.execute.transport.places import Places

NUM_CALLS = 6
"""Number of innermost calls of a traceback that the other ranks are shown."""
_OTHER_RECOMPUTE = (
    "A checkpointed layer did something else when it ran again for its backward. Let it depend on its inputs and "
    "weights alone; what draws at random must draw the same again, so let it draw from torch's default generators, "
    "which checkpointing puts back (preserve_rng_state=True), and not from Python's or numpy's"
)


class FailureReporter:
    """The position board and the watchdog of one rank, and the errors made from them."""

    def __init__(
        self,
        places: Places,
        board: PositionBoard,
        describe: Describe,
        rows_of: Callable[[BaseException], Sequence[int]] = lambda error: (),
    ) -> None:
        """Show this rank's position to the other ranks, and watch the waits of its device in a thread of its own.

        `describe` returns the text of a row (instruction) of a rank. `rows_of` returns the rows of this rank that an
        error may come from; if none, it is from the current row.
        """
        self._places = places
        self._describe = describe
        self._rows_of = rows_of
        self.board = board
        places.watch(board)
        # The transport learns from the board which ranks have left in good order, and the board when this process ends.
        self._calls = calls_of(places.pipeline)
        self._calls.departure_of = partial(departure_of, board)
        self._at_exit = atexit.register(partial(_note_end, weakref.ref(board), os.getpid()))
        self._unblocker = _Unblocker(places)
        self._watchdog = Watchdog(board, places.pipeline.deadline_s, unblock=self._unblocker.look)
        # A pipeline that is dropped without close() takes its thread along.
        weakref.finalize(self, self._watchdog.stop)
        weakref.finalize(self, _note_drop, board, os.getpid()).atexit = False
        self._has_failed = False
        """Whether the ranks must recover before the next step."""

    def begin(self, step: int) -> bool:
        """Note that a step begins on the calling thread; return whether all ranks met again first, after a failure.

        Raises:
            DeadlineExceeded, PeerLost: if a rank does not come.
        """
        has_recovered = self._has_failed
        if has_recovered:
            self._require_all_here()
            try:
                self._places.recover()
            except (DeadlineExceeded, PeerLost):
                self._require_all_here()  # one may have left meanwhile
                raise
            self.board.begin_epoch()
            self._has_failed = self._calls.has_failed_step = False
        self._unblocker.begin()
        self.board.note_step(step)
        self._watchdog.start()
        return has_recovered

    def _require_all_here(self) -> None:
        """Refuse to wait for ranks that have closed the pipeline since the failure. Raises: PeerLost."""
        names, board = self.board.names, self.board
        ways = {number: departure_of(board, number) for number in names.numbers if number != board.rank}
        departures = {number: f"{names.of_number(number)} has {way}" for number, way in ways.items() if way}
        if departures:
            number = min(departures)
            raise PeerLost(f"{', '.join(departures.values())}; make a new one on all ranks", rank=number, peer=number)

    def end(self) -> None:
        """Note that a step is over. Raises: PeerLost, DeadlineExceeded, where it has ended without its messages."""
        error = self._unblocker.end()
        if error is not None:
            raise error
        self.board.note_idle()

    def report(self, error: BaseException) -> PipelineError:
        """Return the error to raise for an error of a step: it says which rank is to blame, and where every rank was.

        `error` is a wait error (the wait for a peer failed, so another rank may be to blame), or anything else that
        this rank's own work raised. Failures are written on the position board, which the other ranks of the host read.
        All connections of this rank are aborted at the end, which ends the waits of its peers.
        """
        # A wait error while the ranks meet again after a failure: a rank is missing.
        wait_error = _own_wait_error(error)
        if self._has_failed and wait_error is not None:
            return self._not_recovered(wait_error)
        self._has_failed = self._calls.has_failed_step = True
        # The watchdog's thread gives up the messages of a step where the device waits in vain, and `error` may only
        # follow from that. `_unblocker.end` returns the watchdog's reason, a wait error, if it has done so.
        error = self._unblocker.end() or error
        wait_error = _own_wait_error(error)
        # Find the instruction at which this rank failed, as the row of the program. The board has the row that the host
        # was at, until `note_failure` below changes its state to FAILED. Where the host is ahead of its device, it is
        # the row of the receive that the device missed (negative: of none), or one of the rows that may have failed.
        position = self.board.read(self.board.rank)
        queue = device_queue_of(self._places.pipeline)
        if queue is not None and queue.missed_row is not None and queue.missed_row >= 0:
            position = replace(position, row=queue.missed_row)
        instructions = " or ".join(
            self._describe(self.board.rank, row) for row in self._rows_of(error) or [position.row] if row >= 0
        )
        # Tell the other ranks, if this rank's own work has failed: the first line of the error, and where it was.
        if wait_error is None:
            summary = f"{type(error).__name__}: {error}".partition("\n")[0]
            calls = "".join(traceback.format_exception(error, limit=-NUM_CALLS))
            # A finding says where the first value that is not finite was made; `noted_place` is the layer that raised.
            finding = error.finding if isinstance(error, PipelineError) else ""
            self.board.note_failure(Failure(summary, instructions, noted_place(error), finding, calls))
        # Find the rank to blame from the positions of all ranks, or adopt the verdict that another rank has written.
        peer = None if wait_error is None else wait_error.peer
        try:
            verdict = diagnose(self.board, self._describe, peer=peer)
        finally:  # a second Ctrl-C included
            # The abort comes last. It wakes the ranks that wait for this one, and they look for a culprit: by now they
            # find this rank's failure, or a verdict to adopt, and not a rank that has just gone quiet.
            self._places.abort()
        return self._error(error, position, instructions, verdict)

    def close(self) -> None:
        """Leave the pipeline."""
        self._watchdog.stop()
        atexit.unregister(self._at_exit)
        note_departure(self.board, self._calls.way_of_closing)
        self._calls.closed_pipeline = self._calls.pipeline

    def _error(self, error: BaseException, position: RankPosition, instruction: str, verdict: Verdict) -> PipelineError:
        rank = self.board.rank
        wait_error = _own_wait_error(error)
        if wait_error is None:
            words = self._own_words(error, instruction, verdict)
            return PipelineError(words, rank=verdict.culprit, instruction=instruction, finding=verdict.finding)
        noticed = "went on when the others had given up"
        if verdict.culprit != rank:
            peer = "the others" if wait_error.peer is None else self.board.names.of_number(wait_error.peer)
            noticed = f"waited {wait_error.waited_s or 0.0:.2f} s for {peer}"
        error_type = PeerLost if verdict.cause is Cause.GONE else type(wait_error)
        # The rank that raised says the rest itself.
        rest = "" if verdict.cause is Cause.RAISED else f"\n\n{verdict.details}"
        return error_type(
            f"{verdict.heading}\n{self.board.name}, {place_of(position, self._describe)}: {noticed}{rest}",
            rank=verdict.culprit,
            instruction=instruction,
            peer=wait_error.peer,
            waited_s=wait_error.waited_s,
            finding=verdict.finding,
        )

    def _own_words(self, error: BaseException, instruction: str, verdict: Verdict) -> str:
        """Quote the error of this rank's own work; the rank to blame also says where all ranks were."""
        rank, place = self.board.rank, noted_place(error)
        place_words = filter(None, (self.board.name, instruction, f"in {place}" if place else ""))
        lines = [f"{', '.join(place_words)}: {type(error).__name__}: {error}", *noted_advice(error)]
        if isinstance(error, CheckpointError):
            lines.append(_OTHER_RECOMPUTE)
        if self.board.num_ranks > 1 and verdict.culprit == rank:
            lines += ["", verdict.positions]
        return "\n".join(lines)

    def _not_recovered(self, error: PeerLost | DeadlineExceeded) -> PipelineError:
        """Say who is missing, and where all are: the verdict on the failure before is no explanation now."""
        table = position_table(read_all(self.board), self._describe)
        return type(error)(
            "\n".join(["after a failed step the ranks could not start afresh", str(error), "", *table]),
            rank=error.rank,
            peer=error.peer,
            waited_s=error.waited_s,
        )


def _note_end(board: weakref.ref[PositionBoard], pid: int) -> None:
    """Note that the process of a rank ends, for ranks that wait for it, unless it does so by an uncaught error.

    A process that was forked off the rank's, such as a data loader's, ends without it.
    """
    own_board = board()
    if own_board is not None and os.getpid() == pid and getattr(sys, "last_value", None) is None:
        note_departure(own_board)


def _note_drop(board: PositionBoard, pid: int) -> None:
    """Note that nobody holds the pipeline of a rank any more, whose connections close with it."""
    if os.getpid() == pid and not departure_of(board, board.rank):
        note_departure(board, "by dropping it")


class _Unblocker:
    """Ends the waits of a device for peers that will not come.

    Where the device blocks the host meanwhile, as a copy to the host does, the host cannot.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._is_in_step = False
        self._error: PeerLost | DeadlineExceeded | None = None

    def begin(self) -> None:
        """Begin with a step, whose messages may be given up from now on."""
        with self._lock:
            self._is_in_step, self._error = True, None

    def end(self) -> PeerLost | DeadlineExceeded | None:
        """End with a step; return why its messages were given up, if they were."""
        with self._lock:
            self._is_in_step = False
            return self._error

    def look(self) -> None:
        """Give up all messages where the device waits in vain, so that it goes on, and the host with it.

        For the thread of the watchdog.
        """
        queue = device_queue_of(self._places.pipeline)
        if queue is None:
            return
        with self._lock:
            error = queue.why_held_up() if self._is_in_step and self._error is None else None
            if error is not None:
                self._error = error
                self._places.abort()


def _own_wait_error(error: BaseException) -> PeerLost | DeadlineExceeded | None:
    """Return the error if a wait of this pipeline raised it; out of a user's layer or loss it is another pipeline's."""
    return error if isinstance(error, (PeerLost, DeadlineExceeded)) and not noted_place(error) else None
