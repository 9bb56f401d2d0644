"""Where every rank is right now, in a small region of memory that all ranks of a host can read.

Each rank writes only its own slot, without locks; readers may see a slot in the middle of a change, which does no harm
to a rank that stands still. The region has no name in the file system once every rank has mapped it, so nothing stays
behind, however a rank ends. What a rank wrote stays readable after its death.

    slot of one rank:  pid epoch step | state row peer since | moment of the verdict | failure | stack | verdict
"""

import mmap
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Protocol

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
"""Behind the state."""
VERDICT_TIME_AT = POSITION_AT + POSITION.size
FAILURE_AT = VERDICT_TIME_AT + MOMENT.size
STACK_AT = FAILURE_AT + LENGTH.size + TEXT_BYTES
VERDICT_AT = STACK_AT + LENGTH.size + TEXT_BYTES
SLOT_BYTES = -(-(VERDICT_AT + LENGTH.size + VERDICT_BYTES) // PAGE_BYTES) * PAGE_BYTES
NO_PEER = -1


class State(IntEnum):
    """What a rank does."""

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
    """It has closed its pipeline."""


IDLE = int(State.IDLE)
RUNNING = int(State.RUNNING)
WAITING = int(State.WAITING)


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank's slot at one moment."""

    rank: int
    pid: int
    epoch: int
    """How often the rank has recovered; texts of an earlier epoch are gone."""
    step: int
    state: State
    row: int
    """Index of its current instruction; -1 before the first one."""
    peer: int | None
    """The rank that it waits for."""
    since_s: float
    """`time.monotonic()` at which the state began."""
    failure: str
    stack: str


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """The finding that some rank has written down."""

    text: str
    recorded_s: float
    rank: int


class Gathers(Protocol):
    """What is needed of a transport to share a board."""

    rank: int
    num_ranks: int

    def all_gather_object(self, value: object) -> list[object]: ...


class PositionBoard:
    """The slots of all ranks, seen from one of them."""

    def __init__(self, memory: mmap.mmap, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self._memory = memory
        self._slot = rank * SLOT_BYTES
        self._position_at = self._slot + POSITION_AT
        self._row = -1
        self._step = -1
        self._base = IDLE
        self._identify()
        self.note_idle()

    @classmethod
    def in_process(cls, num_ranks: int) -> "list[PositionBoard]":
        """Make the boards of ranks that are threads of this process."""
        memory = mmap.mmap(-1, num_ranks * SLOT_BYTES)
        return [cls(memory, rank, num_ranks) for rank in range(num_ranks)]

    @classmethod
    def shared(cls, transport: Gathers, folder: Path) -> "PositionBoard":
        """Make one board per host together with all ranks; every rank calls this.

        The first rank of each host puts a file into `folder` and removes it before this returns. Ranks of other hosts,
        and all other ranks where the file cannot be made or opened, are unknown on this board.
        """
        hosts = transport.all_gather_object(_host())
        leader = hosts.index(hosts[transport.rank])
        size_bytes = transport.num_ranks * SLOT_BYTES
        own_path = _new_file(folder, size_bytes) if leader == transport.rank else ""
        try:
            path = str(transport.all_gather_object(own_path)[leader])
            memory = _map(path, size_bytes)
            board = cls(memory, transport.rank, transport.num_ranks)
            transport.all_gather_object("mapped")
        finally:
            if own_path:
                os.unlink(own_path)
        return board

    # The next four run once per instruction or more often.

    def row_of(self, rank: int) -> int:
        """Tell which row a rank is at: -1 before the first one, 0 at most where it cannot be seen."""
        row: int = ROW.unpack_from(self._memory, rank * SLOT_BYTES + ROW_AT)[0]
        return row

    def note(self, row: int) -> None:
        """Say that the instruction of this row begins."""
        self._row = row
        self._base = RUNNING
        POSITION.pack_into(self._memory, self._position_at, RUNNING, row, NO_PEER, time.monotonic())

    def note_wait(self, peer: int) -> None:
        """Say that this rank waits for a peer, in its current instruction or outside of steps."""
        POSITION.pack_into(self._memory, self._position_at, WAITING, self._row, peer, time.monotonic())

    def note_run(self) -> None:
        """Say that this rank goes on after a wait."""
        POSITION.pack_into(self._memory, self._position_at, self._base, self._row, NO_PEER, time.monotonic())

    def note_step(self, step: int) -> None:
        """Say that a step begins."""
        self._step = step
        self._row = -1
        self._base = RUNNING
        self._identify()
        self._set(State.RUNNING)

    def note_idle(self) -> None:
        """Say that a step is over."""
        self._row = -1
        self._base = IDLE
        self._set(State.IDLE)

    def note_done(self) -> None:
        """Say that this rank has left the pipeline for good."""
        self._set(State.DONE)

    def note_failure(self, text: str) -> None:
        """Say what this rank's own work raised, in one line; in the next, in what of the user's code (or nothing); and
        its traceback in the lines after these.

        Not for errors that only report what a peer did.
        """
        self._write(FAILURE_AT, TEXT_BYTES, text)
        self._set(State.FAILED)

    def note_stack(self, text: str) -> None:
        """Show the peers what this rank's thread is doing; an empty text takes it back."""
        self._write(STACK_AT, TEXT_BYTES, text)

    def note_verdict(self, text: str) -> None:
        """Write down a finding for the other ranks to adopt."""
        MOMENT.pack_into(self._memory, self._slot + VERDICT_TIME_AT, time.monotonic())
        self._write(VERDICT_AT, VERDICT_BYTES, text)

    def begin_epoch(self) -> None:
        """Take back all texts of this rank, after a recovery of all ranks; those of ranks that lag no longer count."""
        for place in (FAILURE_AT, STACK_AT, VERDICT_AT):
            LENGTH.pack_into(self._memory, self._slot + place, 0)
        self.epoch += 1
        self._identify()
        self.note_idle()

    def read(self, rank: int) -> RankPosition:
        """Tell where a rank is."""
        slot = rank * SLOT_BYTES
        pid, epoch, step = IDENTITY.unpack_from(self._memory, slot)
        state, row, peer, since_s = POSITION.unpack_from(self._memory, slot + POSITION_AT)
        is_current = epoch == self.epoch
        return RankPosition(
            rank=rank,
            pid=pid,
            epoch=epoch,
            step=step,
            state=State(state),
            row=row,
            peer=peer if state == State.WAITING else None,
            since_s=since_s,
            failure=self._read(rank, FAILURE_AT) if is_current else "",
            stack=self._read(rank, STACK_AT) if is_current else "",
        )

    def read_all(self) -> list[RankPosition]:
        """Tell where every rank is."""
        return [self.read(rank) for rank in range(self.num_ranks)]

    def first_verdict(self) -> RecordedVerdict | None:
        """Return the earliest finding of this epoch, of whichever rank."""
        found = []
        for rank in range(self.num_ranks):
            slot = rank * SLOT_BYTES
            text = self._read(rank, VERDICT_AT)
            if text and IDENTITY.unpack_from(self._memory, slot)[1] == self.epoch:
                found.append(RecordedVerdict(text, MOMENT.unpack_from(self._memory, slot + VERDICT_TIME_AT)[0], rank))
        return min(found, key=lambda verdict: (verdict.recorded_s, verdict.rank), default=None)

    def _identify(self) -> None:
        IDENTITY.pack_into(self._memory, self._slot, os.getpid(), self.epoch, self._step)

    def _set(self, state: State) -> None:
        POSITION.pack_into(self._memory, self._position_at, state, self._row, NO_PEER, time.monotonic())

    def _write(self, place: int, limit_bytes: int, text: str) -> None:
        start = self._slot + place
        encoded = text.encode(errors="replace")[:limit_bytes]
        LENGTH.pack_into(self._memory, start, 0)  # readers see no text rather than half of one
        self._memory[start + LENGTH.size : start + LENGTH.size + len(encoded)] = encoded
        LENGTH.pack_into(self._memory, start, len(encoded))

    def _read(self, rank: int, place: int) -> str:
        start = rank * SLOT_BYTES + place
        (size_bytes,) = LENGTH.unpack_from(self._memory, start)
        return self._memory[start + LENGTH.size : start + LENGTH.size + size_bytes].decode(errors="ignore")


def _host() -> str:
    """Name what ranks must share to understand each other's process ids and clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _new_file(folder: Path, size_bytes: int) -> str:
    """Return the path of a new file, or an empty text where it cannot be made: a run does not end for its diagnosis."""
    try:
        handle, path = tempfile.mkstemp(prefix="penstock-positions-", dir=folder)
    except OSError:
        return ""
    try:
        os.posix_fallocate(handle, 0, size_bytes)  # on a full disk an error now, not a crash at the first write
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(handle)
    return path


def _map(path: str, size_bytes: int) -> mmap.mmap:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size_bytes)
    except OSError:  # no file, or a container with files of its own: this rank sees only itself, but it can run
        return mmap.mmap(-1, size_bytes)
