"""Proof 3, second half: a program runs to its end under a model of how messages travel (`ir.transports`).

If it does not, a finding says per rank where it is stuck, and what it waits for.

A model is nothing but further rows and waits for `ir.walk`: the rows of a rank at which it can block, then lanes for
the queues of the model and for the collectives. The rows of a lane run in order. Each waits for up to two rows of the
program to be reached and for one other row to end.

Receives never block. One greedy walk is enough: a row that is ready stays ready, so the order in which ready rows run
changes neither which rows end nor whether all do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.deps import NONE
from penstock.ir.hot import Int64s
from penstock.ir.operations import IS_SEND, Op
from penstock.ir.program import Program
from penstock.ir.table import Ints
from penstock.ir.transports import COALESCED, MODELS, PAIR_FIFO, RENDEZVOUS, TransportModel
from penstock.ir.walk import NOT_RUN, Walk, walk
from penstock.proofs.channels import Messages, find_exchanges
from penstock.proofs.collectives import Barrier
from penstock.proofs.report import Subject


def check_transport(subject: Subject, messages: Messages, barriers: Sequence[Barrier], model: TransportModel) -> None:
    """Prove that the program ends under the model; else add one violation per rank that cannot go on."""
    machine = Machine(subject, messages, barriers, model)
    walked = machine.run()
    if walked.is_complete:
        return
    machines = {each: Machine(subject, messages, barriers, each) for each in MODELS if each != model}
    others = [each for each, other in machines.items() if other.run().is_complete]
    passes = ", ".join(str(other) for other in others) or "no other transport"
    fix = f"Lower its schedule with transport={str(model)!r}; as it is, the program passes under {passes}"
    stuck = _Stuck(subject, machine, walked)
    for rank in range(subject.table.num_ranks):
        row = stuck.head(rank)
        if row is not None:
            subject.add(row, f"never ends under the transport {model}: it {stuck.reason(row)}", fix)


class Machine:
    """Lanes of rows and what each row waits for, built up until it runs.

    All that goes between ranks: `messages`, channel after channel in the order of their sends, and `barriers`.
    """

    def __init__(
        self, subject: Subject, messages: Messages, barriers: Sequence[Barrier], model: TransportModel
    ) -> None:
        self.subject = subject
        self.messages = messages
        self.exchanges = find_exchanges(barriers)
        is_queued = model in (PAIR_FIFO, COALESCED)
        self._keep(subject.program, barriers, sends_block=not is_queued)
        if not is_queued:
            self._add_channels(sends_block=model == RENDEZVOUS)
            ends = np.empty((0, 2), np.int64)
        elif model == PAIR_FIFO:
            ends = self._add_pair_queues()
        else:
            ends = self._add_groups()
        for barrier in barriers:
            self._add_barrier(barrier, ends)

    def run(self) -> Walk:
        return walk(self.offsets, self.waits, self.joined, np.zeros(len(self.waits)))

    def _keep(self, program: Program, barriers: Sequence[Barrier], *, sends_block: bool) -> None:
        """Start with the rows that can block: computations, collectives that join ranks, and sends if they block."""
        kept = program.is_compute.copy()
        if sends_block:
            kept |= IS_SEND[program.op]
        for barrier in barriers:
            for rows in barrier.rows.values():
                kept[rows] = True
        self.kept_rows = np.flatnonzero(kept)
        kept_before = np.concatenate([[0], np.cumsum(kept)])
        self.lane_row = np.where(kept, kept_before[:-1], NONE)
        """Per row of the program, its row in the machine."""
        self.offsets = kept_before[program.offsets]
        # A row is reached when the last row before it that can block has ended, on the same rank: an index below the
        # rank's offset is a row of the rank before.
        before = kept_before[:-1] - 1
        self._last_before = np.where(before >= self.offsets[self.subject.rank], before, NONE)
        self.joined = program.joined[self.kept_rows]
        self.waits = np.full((len(self.kept_rows), 3), NONE, np.int32)
        self.ends = np.full((len(self.kept_rows), 2), NONE, np.int32)
        """Per row of the machine, the rows of the program that it is about; the first two waits are for reaching them.
        """

    def last_before(self, rows: Ints) -> Int64s:
        """Return what must have ended for the rows to be reached; `NONE` where they are reached at once."""
        return np.where(rows == NONE, NONE, self._last_before[rows])

    def _wait(self, rows: Ints, ended: Int64s) -> None:
        """Let rows of the program wait for rows of the machine to end."""
        self.waits[self.lane_row[rows], 2] = ended

    def _add_lanes(self, lengths: Ints, ends: Int64s, reached: Int64s, ended: Int64s) -> None:
        """Add rows in lanes of the given lengths, which wait for rows of the program and for one of the machine."""
        first = len(self.waits)
        waits = np.column_stack([self.last_before(reached[:, 0]), self.last_before(reached[:, 1]), ended])
        self.waits = np.concatenate([self.waits, waits.astype(np.int32)])
        self.ends = np.concatenate([self.ends, ends.astype(np.int32)])
        self.joined = np.concatenate([self.joined, np.zeros(len(waits), np.bool_)])
        self.offsets = np.concatenate([self.offsets, first + np.cumsum(lengths)])

    def _add_channels(self, *, sends_block: bool) -> None:
        """Let consumers wait for their send, and a send that blocks until its receive is reached."""
        messages = self.messages
        sends = self.lane_row[messages.send]
        self._wait(messages.consumer, sends)
        if sends_block:
            self.waits[sends, 0] = self.last_before(messages.receive)
            self.ends[sends, 0] = messages.receive

    def _add_pair_queues(self) -> Int64s:
        """Add a lane per pair of ranks, whose n-th row is the match of the n-th entries; return those of exchanges.

        Entries that are not the same message never match: the first such row waits for the row after it, which is one
        of the same queue, since a message is missing at its place at either end.
        """
        messages, exchanges = self.messages, self.exchanges
        once = exchanges.send < exchanges.receive  # an exchange goes both ways, and is one entry of the pair's queue
        ends = np.column_stack([
            np.concatenate([messages.send, exchanges.send[once]]),
            np.concatenate([messages.receive, exchanges.receive[once]]),
        ])  # fmt: skip
        ends.sort(axis=1)  # rows are stored rank after rank, so this is the lower rank's end and the higher one's
        ranks = self.subject.rank[ends].astype(np.int64)
        pair = ranks[:, 0] * self.subject.table.num_ranks + ranks[:, 1]
        # The same entries in the order of either end: where the two differ, both ranks wait for another message.
        low, high = (np.argsort(pair * self.subject.table.num_rows + ends[:, side]) for side in (0, 1))
        first = len(self.waits)
        own = first + np.arange(len(ends))
        _, lengths = np.unique(pair, return_counts=True)
        # A row that waits for the next row of its lane never ends. The minimum only keeps the index within the machine.
        never = np.minimum(own + 1, first + len(own) - 1)
        entries = np.column_stack([ends[low, 0], ends[high, 1]])
        self._add_lanes(lengths, entries, entries, np.where(low == high, NONE, never))
        place = np.empty(len(ends), np.int64)
        place[low] = own
        self._wait(messages.consumer, place[: len(messages.send)])
        return np.column_stack([exchanges.send[once], place[len(messages.send) :]])

    def _add_groups(self) -> Int64s:
        """Add a lane per rank with its groups: a row for a group's start, then one per end, for the other end's group.

        Return the ends of exchanges. An exchange is a group of its own.
        """
        messages, exchanges = self.messages, self.exchanges
        num_messages, num_exchanges = len(messages.send), len(exchanges.send)
        # All ends: sends and receives of messages, then of exchanges; and for each the number of its other end.
        mine = np.concatenate([messages.send, messages.receive, exchanges.send, exchanges.receive])
        numbers = np.split(np.arange(len(mine)), np.cumsum([num_messages, num_messages, num_exchanges]))
        other = np.concatenate([numbers[1], numbers[0], numbers[3], numbers[2]])

        # In the order of their rows, a group opens where a rank has run another row that can block since the last end.
        order = np.argsort(mine, kind="stable")
        row, is_exchange = mine[order], order >= 2 * num_messages
        rank, posted = self.subject.rank[row], self.last_before(row)
        opens = np.ones(len(row), np.bool_)
        opens[1:] = (rank[1:] != rank[:-1]) | (posted[1:] != posted[:-1]) | (is_exchange[1:] != is_exchange[:-1])
        group = np.cumsum(opens) - 1
        group_of = np.empty(len(row), np.int64)
        group_of[order] = group

        # In the machine, each group is the row of its start and one row per end.
        first, size = len(self.waits), len(row) + int(np.count_nonzero(opens))
        start = first + np.flatnonzero(opens) + np.arange(size - len(row))
        place = np.empty(len(row), np.int64)
        place[order] = first + np.arange(len(row)) + group + 1
        ends, reached = np.full((2, size, 2), NONE, np.int64)
        ends[start - first, 0] = reached[start - first, 0] = row[opens]
        ends[place - first] = np.column_stack([mine, mine[other]])
        ended = np.full(size, NONE, np.int64)
        ended[place - first] = start[group_of[other]]
        lengths = np.bincount(rank, minlength=self.subject.table.num_ranks)
        lengths += np.bincount(rank[opens], minlength=self.subject.table.num_ranks)
        self._add_lanes(lengths, ends, reached, ended)
        end = np.append(start[1:], first + size) - 1
        self._wait(messages.consumer, end[group_of[numbers[1]]])
        return np.column_stack([exchanges.send, end[group_of[numbers[2]]]])

    def _add_barrier(self, barrier: Barrier, ends: Int64s) -> None:
        """Add a lane with one row per member, and one per end of its exchanges; the collective ends with the last."""
        members = np.array([rows[0] for rows in barrier.rows.values()])
        # First the members, all of which must be reached; then the exchanges among them, which must have ended.
        exchanged = ends[np.isin(ends[:, 0], members), 1] if barrier.is_exchange else np.empty(0, np.int64)
        size = len(members) + len(exchanged)
        reached = np.full((size, 2), NONE, np.int64)
        reached[: len(members), 0] = members
        ended = np.full(size, NONE, np.int64)
        ended[len(members) :] = exchanged
        self._add_lanes(np.array([size]), reached, reached, ended)
        rows = np.concatenate(list(barrier.rows.values()))
        self._wait(rows, np.full(len(rows), len(self.waits) - 1))


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A machine that came to a halt, and the words for it."""

    subject: Subject
    machine: Machine
    walked: Walk

    def head(self, rank: int) -> int | None:
        """The row of the program at which a rank is stuck."""
        at = int(self.walked.reached[rank])
        return int(self.machine.kept_rows[at]) if at < self.machine.offsets[rank + 1] else None

    def reason(self, row: int) -> str:
        """Say what the row waits for at which a rank is stuck."""
        machine = self.machine
        op, at = Op(int(self.subject.table.op[row])), int(machine.lane_row[row])
        if op.is_send:
            return f"waits for {self._where(int(machine.ends[at, 0]))}"
        if not op.is_compute:
            return f"waits for {self._hold(self._first_open(int(machine.waits[at, 2])))}"
        send, awaited = self._message(row)
        open_row = self._first_open(awaited)
        if awaited < len(machine.kept_rows):
            return f"waits for the message of {self._where(send)}"
        if send in machine.ends[open_row] and not self._is_crossing(open_row):
            return f"waits for the message of {self._hold(open_row)}"
        text = self.subject.text(int(machine.ends[open_row, 0]))
        held = f"waits for the message of {self.subject.place(send)}, which is held up"
        return f"{held}: {text} waits for {self._hold(open_row)}"

    def _message(self, row: int) -> tuple[int, int]:
        """The send of the message that a computation or its partner waits for, and the row that is awaited for it."""
        messages, lane_row = self.machine.messages, self.machine.lane_row
        members = [row, row + 1] if self.subject.table.joined[row] else [row]
        found = np.flatnonzero(np.isin(messages.consumer, members))
        for index in found.tolist():
            awaited = int(self.machine.waits[lane_row[messages.consumer[index]], 2])
            if self._is_open(awaited):
                return int(messages.send[index]), awaited
        raise AssertionError(f"{self.subject.text(row)} waits for no message")

    def _first_open(self, at: int) -> int:
        """The first row of a lane that has not ended, given a row of that lane."""
        lane = int(np.searchsorted(self.machine.offsets, at, side="right")) - 1
        return int(self.walked.reached[lane])

    def _is_crossing(self, at: int) -> bool:
        """Whether a row is that of a pair's queue whose two entries are not the same message."""
        return self._open_wait(at) == 2 and self._first_open(int(self.machine.waits[at, 2])) == at

    def _hold(self, at: int) -> str:
        """Say what the first open row of a queue's or a collective's lane waits for."""
        machine, place = self.machine, self.subject.place
        column = self._open_wait(at)
        one, other = (int(row) for row in machine.ends[at])
        if column < 2:
            return self._where(one if column == 0 else other)
        awaited = int(machine.waits[at, column])
        open_row = self._first_open(awaited)
        if one == NONE:  # a collective, whose exchange is an entry of a queue
            return self._hold(open_row)
        if self._is_crossing(at):
            return f"its other end, but meets {place(other)} in the queue of the two ranks"
        if self._open_wait(awaited) == 0:  # the rank at the other end has not come to it
            return self._where(other)
        return f"{place(other)}, which is after the open group of {self.subject.text(int(machine.ends[open_row, 0]))}"

    def _open_wait(self, at: int) -> int:
        """Which of the waits of a row of the machine has not ended."""
        waits = self.machine.waits[at]
        return next(
            (column for column in range(3) if waits[column] != NONE and self._is_open(int(waits[column]))), NONE
        )

    def _is_open(self, at: int) -> bool:
        return bool(self.walked.end[at] == NOT_RUN)

    def _where(self, row: int) -> str:
        rank = int(self.subject.rank[row])
        head = self.head(rank)
        where = "" if head is None or head == row else f", while rank {rank} is at {self.subject.place(head)}"
        return self.subject.place(row) + where
