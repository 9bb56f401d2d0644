"""Proof 3, second half: a program runs to its end under a model of how messages travel.

`Buffered(n)`    a send blocks while n messages of its channel are sent and no receive is posted for them
`RENDEZVOUS`     n = 0: a send blocks until its receive is posted; what passes here passes for every n
`SINGLE_QUEUE`   the sends and receives between two ranks, both directions, form one queue at each end, and the heads
                 must match; those with no computation between them form one group, inside which the order is free (NCCL
                 with one communicator and coalesced groups). Posting does not block.

Receives never block, computations wait for their message. A model is nothing but further rows and waits for `ir.walk`:
the rows of a rank that can block, then one lane per queue and one per collective.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.walk import NOT_RUN, Walk, walk
from penstock.proofs.channels import Messages, Rows
from penstock.proofs.collectives import Join
from penstock.proofs.report import Findings, Subject


@dataclass(frozen=True, slots=True)
class Buffered:
    """One in-order channel per ordered pair of ranks that takes `capacity` messages ahead of their receives."""

    capacity: int

    def __str__(self) -> str:
        return f"buffered({self.capacity})" if self.capacity else "rendezvous"


@dataclass(frozen=True, slots=True)
class SingleQueue:
    """One queue per unordered pair of ranks, coalesced between computations."""

    def __str__(self) -> str:
        return "single queue"


TransportModel = Buffered | SingleQueue
RENDEZVOUS = Buffered(0)
SINGLE_QUEUE = SingleQueue()
ALL_TRANSPORTS: tuple[TransportModel, ...] = (RENDEZVOUS, SINGLE_QUEUE)
"""What passes both passes every `Buffered` too: a larger buffer only takes waits away."""


def check_transport(
    subject: Subject, messages: Messages, joins: list[Join], model: TransportModel, findings: Findings
) -> bool:
    """Prove that the program ends under the model; else tell per rank where it stands and what it waits for.

    `messages` stand channel after channel, in the order of the sends.
    """
    machine = _Machine.of(subject, joins, sends_block=isinstance(model, Buffered))
    queues = None
    if isinstance(model, Buffered):
        machine.wait(messages.consumer, machine.lane_row[messages.send])
        gated, gate = _gates(messages.channel(subject), model.capacity)
        machine.wait(messages.send[gated], machine.last_before(messages.receive[gate]))
    else:
        queues = _Queues.of(subject, machine, messages)
        queues.add_to(machine, messages)
    walked = machine.run()
    if walked.is_complete:
        return True
    _Stuck(subject, messages, joins, machine, walked, queues).add_to(findings, model)
    return False


class _Machine:
    """Lanes of rows and what each row waits for, built up until it runs."""

    def __init__(self, subject: Subject, kept: NDArray[np.bool_]) -> None:
        table = subject.table
        self.kept_rows = np.flatnonzero(kept)
        kept_before = np.concatenate([[0], np.cumsum(kept)])
        self.lane_row = np.where(kept, kept_before[:-1], NONE)
        """Per row of the program, its row in the machine."""
        self.offsets = kept_before[table.offsets]
        before = kept_before[:-1] - 1
        self._last_before = np.where(before >= self.offsets[subject.rank], before, NONE)
        self.joined = table.joined[self.kept_rows]
        self.waits = np.full((len(self.kept_rows), 3), NONE, np.int32)

    @classmethod
    def of(cls, subject: Subject, joins: list[Join], *, sends_block: bool) -> "_Machine":
        """Keep the rows that can block: computations, collectives that join ranks, and sends if they block."""
        kept = subject.table.is_compute.copy()
        if sends_block:
            kept |= (subject.op == Op.SEND_FORWARD) | (subject.op == Op.SEND_BACKWARD)
        for join in joins:
            for rows in join.rows.values():
                kept[rows] = True
        machine = cls(subject, kept)
        for join in joins:
            machine._add_join(join)
        return machine

    def last_before(self, rows: Rows) -> NDArray[np.int64]:
        """Return what must have ended for the rows to be reached; `NONE` where they are reached at once."""
        reached: NDArray[np.int64] = self._last_before[rows]
        return reached

    def wait(self, rows: Rows, *needed: NDArray[np.int64]) -> None:
        """Let rows of the program wait for rows of the machine."""
        self.waits[self.lane_row[rows], : len(needed)] = np.column_stack(needed)

    def add_lanes(self, lengths: NDArray[np.int64], waits: NDArray[np.int64]) -> int:
        """Add rows in lanes of the given lengths; return the first new row."""
        first = len(self.waits)
        self.waits = np.concatenate([self.waits, waits.astype(np.int32)])
        self.joined = np.concatenate([self.joined, np.zeros(len(waits), np.bool_)])
        self.offsets = np.concatenate([self.offsets, first + np.cumsum(lengths)])
        return first

    def _add_join(self, join: Join) -> None:
        """Add a lane with one row per member; the collective ends with the last of them."""
        first_rows = np.array([rows[0] for rows in join.rows.values()])
        waits = np.full((len(first_rows), 3), NONE, np.int64)
        waits[:, 0] = self.last_before(first_rows)
        first = self.add_lanes(np.array([len(waits)]), waits)
        rows = np.concatenate(list(join.rows.values()))
        self.wait(rows, np.full(len(rows), first + len(waits) - 1))

    def run(self) -> Walk:
        return walk(self.offsets, self.waits, self.joined, np.zeros(len(self.waits)))


def _gates(channel: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which messages' sends wait for a receive, and for that of which message: the one `capacity` earlier."""
    index = np.arange(len(channel))
    gate = index - capacity
    gated = gate >= 0
    gated[gated] = channel[gate[gated]] == channel[index[gated]]
    return index[gated], gate[gated]


@dataclass(frozen=True, slots=True, eq=False)
class _Queues:
    """Both ends of every message, sorted by queue; an end is done when it and all in front of it have matched."""

    row: Rows
    """[num_ends] the row of the program."""
    lengths: NDArray[np.int64]
    """[num_queues] number of ends."""
    send_end: NDArray[np.int64]
    """[num_messages] the place of the message among the ends of its sender; `receive_end` of its receiver."""
    receive_end: NDArray[np.int64]
    group_before: NDArray[np.int64]
    """[num_ends] the last end of the group in front, `NONE` for a queue's first group."""

    @classmethod
    def of(cls, subject: Subject, machine: _Machine, messages: Messages) -> "_Queues":
        num_ranks, num_messages = subject.table.num_ranks, len(messages.send)
        channel = messages.channel(subject)
        sender, receiver = channel // num_ranks, channel % num_ranks
        row = np.concatenate([messages.send, messages.receive])
        queue = np.concatenate([channel, receiver * num_ranks + sender])
        order = np.argsort(queue * subject.num_rows + row)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        row, queue = row[order], queue[order]

        group = machine.last_before(row)
        new_queue = np.ones(len(row), np.bool_)
        new_queue[1:] = queue[1:] != queue[:-1]
        new_group = new_queue.copy()
        new_group[1:] |= group[1:] != group[:-1]
        at = np.arange(len(row))
        start_of_group = np.maximum.accumulate(np.where(new_group, at, 0))
        start_of_queue = np.maximum.accumulate(np.where(new_queue, at, 0))
        group_before = np.where(start_of_group > start_of_queue, start_of_group - 1, NONE)
        lengths = np.diff(np.append(np.flatnonzero(new_queue), len(row)))
        return cls(row, lengths, place[:num_messages], place[num_messages:], group_before)

    def add_to(self, machine: _Machine, messages: Messages) -> None:
        """Add a lane per queue, and let consumers wait for the match of their message."""
        first = len(machine.waits)
        behind_sender = self._shifted(self.group_before[self.send_end], first)
        behind_receiver = self._shifted(self.group_before[self.receive_end], first)
        send_posted, receive_posted = machine.last_before(messages.send), machine.last_before(messages.receive)
        machine.wait(messages.consumer, behind_sender, behind_receiver, send_posted)
        waits = np.full((len(self.row), 3), NONE, np.int64)
        waits[self.send_end] = np.column_stack([behind_receiver, send_posted, receive_posted])
        waits[self.receive_end] = np.column_stack([behind_sender, send_posted, receive_posted])
        machine.add_lanes(self.lengths, waits)

    @staticmethod
    def _shifted(ends: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        return np.where(ends == NONE, NONE, ends + first)


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A machine that came to a halt, and the words for it."""

    subject: Subject
    messages: Messages
    joins: list[Join]
    machine: _Machine
    walked: Walk
    queues: _Queues | None

    def add_to(self, findings: Findings, model: TransportModel) -> None:
        """Add one violation per rank that cannot go on."""
        for rank in range(self.subject.table.num_ranks):
            row = self._head(rank)
            if row is not None:
                findings.add(
                    row,
                    f"never ends under the {model} transport: it {self._reason(row)}",
                    "Give the sends and receives of each pair of ranks one common order, or post the receive earlier",
                )

    def _head(self, rank: int) -> int | None:
        """The row of the program at which a rank stands."""
        at = int(self.walked.reached[rank])
        return int(self.machine.kept_rows[at]) if at < self.machine.offsets[rank + 1] else None

    def _is_reached(self, row: int) -> bool:
        before = int(self.machine.last_before(np.array([row]))[0])
        return before == NONE or bool(self.walked.end[before] != NOT_RUN)

    def _reason(self, row: int) -> str:
        program = self.subject.table
        assert isinstance(program, Program)
        op = Op(int(program.op[row]))
        if op.is_send:
            index = int(np.flatnonzero(self.messages.send == row)[0])
            return f"waits for {self._where(int(self.messages.receive[index]))} to make room"
        if not op.is_compute:
            return self._join_reason(row)
        members = [row, row + 1] if program.joined[row] else [row]
        found = np.flatnonzero(np.isin(self.messages.consumer, members))
        send = next((int(s) for s in self.messages.send[found] if not self._has_matched(int(s))), None)
        if send is None:
            return "waits for its message"
        if not self._is_reached(send) or self.queues is None:
            return f"waits for the message of {self._where(send)}"
        return f"waits for the message of {self.subject.place(send)}, which other messages of the two ranks hold up"

    def _join_reason(self, row: int) -> str:
        join = next(join for join in self.joins if any(row in rows for rows in join.rows.values()))
        absent = next(rows[0] for rows in join.rows.values() if not self._is_reached(rows[0]))
        return f"waits for {self._where(absent)}"

    def _has_matched(self, send: int) -> bool:
        at = int(self.machine.lane_row[send])
        if self.queues is not None:
            index = int(np.flatnonzero(self.messages.send == send)[0])
            end = int(self.queues.send_end[index])
            at = len(self.walked.end) - len(self.queues.row) + end
        return bool(self.walked.end[at] != NOT_RUN)

    def _where(self, row: int) -> str:
        rank = int(self.subject.rank[row])
        head = self._head(rank)
        stands = "" if head is None or head == row else f", while rank {rank} stands at {self.subject.place(head)}"
        return self.subject.place(row) + stands
