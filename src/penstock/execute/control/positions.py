"""Where every rank is right now, in a small region of memory that all ranks of a host can read.

Each rank writes only its own slot, without locks; readers may see a slot in the middle of a change, which does no harm
to a rank that stands still. The memory is anonymous (`memfd_create` of Linux): no disk stalls a rank that writes, and
nothing stays behind, however a rank ends. The slot of a rank stays readable after its death.

    slot of one rank:  pid epoch step | state row peer since | moment of the verdict | failure | stack | verdict

Guarantees: noting a position waits for nobody, and a rank that stands still is read as it is, also after its death.
Relies on: one thread of a rank writes at a time, but for the stack, which its watchdog alone writes during a step; the
ranks of a host share the clock that dates positions.
"""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.shared_memory import memory_file

PAGE_BYTES = 4096
IDENTITY = Struct("<qqq")
POSITION = Struct("<qqqd")
ROW = Struct("<q")
LENGTH = Struct("<q")
MOMENT = Struct("<d")
TEXT_BYTES = 8000
VERDICT_BYTES = 24000
POSITION_AT = IDENTITY.size
ROW_AT = POSITION_AT + ROW.size
"""Offset of the row, which stands behind the state."""
VERDICT_TIME_AT = POSITION_AT + POSITION.size
FAILURE_AT = VERDICT_TIME_AT + MOMENT.size
STACK_AT = FAILURE_AT + LENGTH.size + TEXT_BYTES
VERDICT_AT = STACK_AT + LENGTH.size + TEXT_BYTES
SLOT_BYTES = -(-(VERDICT_AT + LENGTH.size + VERDICT_BYTES) // PAGE_BYTES) * PAGE_BYTES
NO_PEER = -1
SEPARATOR = "\x1f"
"""ASCII's separator, between the fields of a text; a text that is too long loses its end."""


class State(IntEnum):
    """The activity of a rank."""

    UNKNOWN = 0
    """Nothing can be seen, because the rank is on another host."""
    IDLE = 1
    """It is between steps."""
    RUNNING = 2
    WAITING = 3
    """It waits for a peer."""
    FAILED = 4
    """Its own work raised an error."""
    DONE = 5
    """It has closed its pipeline, or its process has ended in good order."""
    COMPILING = 6
    """torch.compile compiles something in its current instruction."""


IDLE = int(State.IDLE)
RUNNING = int(State.RUNNING)
WAITING = int(State.WAITING)


class Failure(NamedTuple):
    """An error that a rank's own work raised."""

    summary: str
    """The error in one line."""
    instructions: str = ""
    """The instruction that raised it; where a device failed that the host was ahead of, all that it may be."""
    place: str = ""
    """The layer or function of the user's that raised it, if one did."""
    finding: str = ""
    """The place of the first value that is not finite, if the rank has found one."""
    calls: str = ""
    """The end of the traceback; it is the last field, since the end of a long text is lost."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank's slot at one moment."""

    rank: int
    name: str
    pid: int
    step: int
    state: State
    row: int
    """Index of its current instruction; -1 before the first one."""
    peer: int | None
    """The rank that it waits for."""
    since_s: float
    """`time.monotonic()` at which the state began."""
    failure: Failure | None
    stack: str
    verdict: str
    """The finding that the rank has written down; empty where it has not."""
    verdict_s: float
    """`time.monotonic()` at which it did."""


class PositionMemory:
    """The memory of one host's ranks, until all of them have mapped it; every rank makes one, the first one's counts.

    Its path leads through the files of the process that made it, so it is open to processes of the same user only.
    """

    def __init__(self, names: RankNames) -> None:
        """`names` are those of all ranks; a slot is at the number of its rank."""
        self.path = ""
        """Path of the memory; empty where there is none."""
        self._names = names
        self._num_bytes = (1 + max(names.numbers)) * SLOT_BYTES
        try:
            self._file = memory_file("penstock-positions", self._num_bytes)
        except (AttributeError, OSError):  # no Linux, or no file left: a run does not end for its diagnosis
            return
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def __enter__(self) -> "PositionMemory":
        return self

    def __exit__(self, *error: object) -> None:
        """Free the memory here; it lives on in those that have mapped it."""
        if self.path:
            os.close(self._file)
            self.path = ""

    def board(self, index: int, hosts: Sequence[str], paths: Sequence[str]) -> "PositionBoard":
        """Return a rank's board in the memory of the first rank of its host; all ranks' hosts and paths are given.

        Ranks of other hosts, and all other ranks where the memory cannot be opened, are unknown on this board.
        """
        try:
            with open(paths[hosts.index(hosts[index])], "r+b") as file:
                memory = mmap.mmap(file.fileno(), self._num_bytes)
        except OSError:  # none, or another user's: this rank sees only itself, but it can run
            memory = mmap.mmap(-1, self._num_bytes)
        return PositionBoard(memory, self._names.numbers[index], self._names)


class PositionBoard:
    """The slots of all ranks, seen from one of them."""

    def __init__(self, memory: mmap.mmap, rank: int, names: RankNames) -> None:
        """`rank` is the number of this rank; the board counts all ranks by their numbers."""
        self.rank = rank
        self.names, self.name = names, names.of_number(rank)
        self.num_ranks = len(names.numbers)
        self.epoch = 0
        self.row = -1
        """Index of this rank's current instruction; -1 before the first one of a step."""
        self._memory = memory
        self._slot = rank * SLOT_BYTES
        self._position_at = self._slot + POSITION_AT
        self._step = -1
        self._base = IDLE
        self.note_idle()

    # `row_of`, `note`, `note_wait` and `note_run` run once per instruction or more often.

    def row_of(self, rank: int) -> int:
        """Tell which row a rank is at: -1 before the first one, 0 at most where it cannot be seen."""
        row: int = ROW.unpack_from(self._memory, rank * SLOT_BYTES + ROW_AT)[0]
        return row

    def note(self, row: int) -> None:
        """Say that the instruction of this row begins."""
        self.row = row
        self._base = RUNNING  # where `note_run` returns to: a rank may also wait outside of steps
        POSITION.pack_into(self._memory, self._position_at, RUNNING, row, NO_PEER, time.monotonic())

    def note_wait(self, peer: int, row: int | None = None) -> None:
        """Say that this rank waits for a peer, in the instruction of this row; None: in the current one, or in none.

        A host may be ahead of its device, which waits for what an earlier instruction needs.
        """
        waiting_row = self.row if row is None else row
        POSITION.pack_into(self._memory, self._position_at, WAITING, waiting_row, peer, time.monotonic())

    def note_run(self) -> None:
        """Say that this rank goes on after a wait."""
        POSITION.pack_into(self._memory, self._position_at, self._base, self.row, NO_PEER, time.monotonic())

    def note_step(self, step: int) -> None:
        """Say that a step begins."""
        self._step = step
        self.row = -1
        self._base = RUNNING
        self.note_state(State.RUNNING)

    def note_idle(self) -> None:
        """Say that a step is over."""
        self.row = -1
        self._base = IDLE
        self.note_state(State.IDLE)

    def note_state(self, state: State) -> None:
        """Say what this rank does: it has left the pipeline for good (DONE), or compiles, until `note_run`."""
        IDENTITY.pack_into(self._memory, self._slot, os.getpid(), self.epoch, self._step)
        POSITION.pack_into(self._memory, self._position_at, state, self.row, NO_PEER, time.monotonic())

    def note_failure(self, failure: Failure) -> None:
        """Say what this rank's own work raised; not for errors that only report what a peer did."""
        _write_text(self._memory, self._slot + FAILURE_AT, TEXT_BYTES, SEPARATOR.join(failure))
        self.note_state(State.FAILED)

    def note_stack(self, text: str) -> None:
        """Show the peers what this rank's thread is doing; an empty text takes it back."""
        _write_text(self._memory, self._slot + STACK_AT, TEXT_BYTES, text)

    def note_verdict(self, text: str) -> None:
        """Write down a finding for the other ranks to adopt."""
        MOMENT.pack_into(self._memory, self._slot + VERDICT_TIME_AT, time.monotonic())
        _write_text(self._memory, self._slot + VERDICT_AT, VERDICT_BYTES, text)

    def begin_epoch(self) -> None:
        """Take back all texts of this rank, after a recovery of all ranks; those of ranks that lag no longer count."""
        for offset in (FAILURE_AT, STACK_AT, VERDICT_AT):
            LENGTH.pack_into(self._memory, self._slot + offset, 0)
        self.epoch += 1
        self.note_idle()

    def read(self, rank: int) -> RankPosition:
        """Return what a rank has last written of itself: its step, its row in the program, and what it does there.

        The memory is shared by the ranks of a host, each of which writes to a slot of its own. The slot of a rank on
        another host is empty, and has the state UNKNOWN. The three texts are empty unless the rank has failed
        (`failure`), has shown what its thread does (`stack`), or has found which rank is to blame (`verdict`).
        """
        memory, slot = self._memory, rank * SLOT_BYTES
        pid, epoch, step = IDENTITY.unpack_from(memory, slot)
        state, row, peer, since_s = POSITION.unpack_from(memory, slot + POSITION_AT)
        (verdict_s,) = MOMENT.unpack_from(memory, slot + VERDICT_TIME_AT)
        # An epoch begins when all ranks recover from a failure. A rank that has not come so far yet still shows texts
        # about that failure, which do not count any more.
        failure, stack, verdict = (
            _read_text(memory, slot + offset) if epoch == self.epoch else ""
            for offset in (FAILURE_AT, STACK_AT, VERDICT_AT)
        )
        return RankPosition(
            rank=rank,
            name=self.names.of_number(rank),
            pid=pid,
            step=step,
            state=State(state),
            row=row,
            peer=peer if state == State.WAITING else None,
            since_s=since_s,
            failure=Failure(*failure.split(SEPARATOR)[: len(Failure._fields)]) if failure else None,
            stack=stack,
            verdict=verdict,
            verdict_s=verdict_s,
        )

    def gave_up(self) -> int | None:
        """Return another rank that has failed in the step at hand, or found who did; None where none can be seen."""
        memory, current_step = self._memory, (self.epoch, self._step)
        for number in self.names.numbers:
            slot = number * SLOT_BYTES
            is_other = slot != self._slot and IDENTITY.unpack_from(memory, slot)[1:] == current_step
            if is_other and (
                ROW.unpack_from(memory, slot + POSITION_AT)[0] == State.FAILED
                or LENGTH.unpack_from(memory, slot + VERDICT_AT)[0]
            ):
                return number
        return None


def read_all(board: PositionBoard) -> list[RankPosition]:
    """Tell where every rank is."""
    return [board.read(number) for number in board.names.numbers]


def note_departure(board: PositionBoard, place: str = "") -> None:
    """Say that this rank leaves in good order: by the close() at a line of the user's, or as its process ends."""
    board.note_stack(place)  # where it was at last, as of a rank that stands still
    board.note_state(State.DONE)


def departure_of(board: PositionBoard, rank: int) -> str:
    """Say what a rank has done to leave in good order; empty where it has not, or cannot be seen."""
    position = board.read(rank)
    if position.state is not State.DONE:
        return ""
    return f"closed the pipeline ({position.stack})" if position.stack else "ended"


def first_verdict(board: PositionBoard) -> str:
    """Return the finding that was written down first, by whichever rank; empty where there is none."""
    verdicts = [position for position in read_all(board) if position.verdict]
    return min(verdicts, key=lambda position: (position.verdict_s, position.rank)).verdict if verdicts else ""


def _write_text(memory: mmap.mmap, start: int, limit_bytes: int, text: str) -> None:
    encoded = text.encode(errors="replace")[:limit_bytes]
    LENGTH.pack_into(memory, start, 0)  # readers see no text rather than half of one
    memory[start + LENGTH.size : start + LENGTH.size + len(encoded)] = encoded
    LENGTH.pack_into(memory, start, len(encoded))


def _read_text(memory: mmap.mmap, start: int) -> str:
    (size_bytes,) = LENGTH.unpack_from(memory, start)
    return memory[start + LENGTH.size : start + LENGTH.size + size_bytes].decode(errors="ignore")
