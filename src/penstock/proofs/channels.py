"""Proof 3, first half: on every channel the sends and the receives are the same messages in the same order.

A message is known by its direction (output or gradient), the stage that makes it, microbatch and slice. The members of
a tied group send their gradients to each other on the same channels: such an exchange keeps its place among them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, RowIndex
from penstock.ir.hot import blocks
from penstock.ir.instruction import Instruction
from penstock.ir.operations import IS_MESSAGE, MESSAGES, OPERATIONS, At, Op, makers, peer_at
from penstock.ir.program import Program
from penstock.proofs.collectives import Barrier
from penstock.proofs.order import Actions, bounds_of_stage
from penstock.proofs.report import Findings, Subject, first_of_each

Rows = NDArray[np.int32]
NEIGHBOUR = {At.DOWNSTREAM: "next", At.UPSTREAM: "previous"}
"""Which stage of the route is at the other end."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The four rows of every message, [num_messages] each."""

    producer: Rows
    send: Rows
    receive: Rows
    consumer: Rows

    def channel(self, subject: Subject) -> NDArray[np.int64]:
        """[num_messages] sending rank x num_ranks + receiving rank."""
        channel: NDArray[np.int64] = subject.rank[self.send].astype(np.int64)
        channel *= subject.table.num_ranks
        channel += subject.rank[self.receive]
        return channel


def count_messages(actions: Actions, before: NDArray[np.int32]) -> int:
    """Return how many results cross from rank to rank."""
    begin, end = bounds_of_stage(actions.schedule)
    count = 0
    for part in blocks(len(before)):
        source, stage = before[part, 0], actions.schedule.stage[part]
        count += int(np.count_nonzero((source != NONE) & ((source < begin.take(stage)) | (source >= end.take(stage)))))
    return count


def find_messages(subject: Subject, rows: RowIndex, findings: Findings) -> list[Messages]:
    """Prove that every send has its receive, its producer and its consumer; return the messages that have all four.

    `rows` are those of the program. There is one entry per stage and direction; most are views of the index.
    """
    found = []
    for possible in _possible_messages(subject, rows, findings):
        is_needed, is_sent, is_received = (end != NONE for end in (possible.producer, possible.send, possible.receive))
        is_whole = is_needed & is_sent & is_received
        if is_whole.all():
            found.append(possible)
            continue
        if not np.array_equal(is_whole, is_needed | is_sent | is_received):
            _tell_missing_ends(findings, possible)
        ends = (possible.producer, possible.send, possible.receive, possible.consumer)
        found.append(Messages(*(end[is_whole] for end in ends)))
    return found


def join_messages(parts: Sequence[Messages]) -> Messages:
    """Put messages one after the other."""
    none = np.empty(0, np.int32)
    ends = ("producer", "send", "receive", "consumer")
    return Messages(*(np.concatenate([none, *(getattr(part, end) for part in parts)]) for end in ends))


def _possible_messages(subject: Subject, rows: RowIndex, findings: Findings) -> Iterator[Messages]:
    """The rows of every message that could be, `NONE` where there is none: outputs, then gradients, by their makers."""
    crossings = {at: _Crossing.of(subject, side) for at, side in NEIGHBOUR.items()}
    has_right_ends = _has_right_ends(subject, rows, crossings)
    find = rows.plane if has_right_ends else _Ends(subject, findings, rows.shape).locate
    for send, receive in MESSAGES.values():
        crossing, maker = crossings[peer_at(send)], makers(OPERATIONS[send].reads[0].value)[0]
        made, sent, received = rows.plane(maker), find(send), find(receive)
        for source, target in zip(crossing.makers.tolist(), crossing.takers.tolist(), strict=True):
            receiver = target if has_right_ends else source  # `_Ends` names both ends after the maker
            ends = (made[source], sent[source], received[receiver], made[target])
            yield Messages(*(end.reshape(-1) for end in ends))


@dataclass(frozen=True, slots=True, eq=False)
class _Crossing:
    """Messages to one side, the next or the previous stage of a route."""

    neighbour: NDArray[np.int32]
    """[num_stages] the stage at the other end, `NONE` where there is none or it is on the same rank."""
    makers: NDArray[np.int64]
    """The stages whose results leave their rank, and the stages that take them."""
    takers: NDArray[np.int32]

    @classmethod
    def of(cls, subject: Subject, side: str) -> "_Crossing":
        placement = subject.table.placement
        neighbour = np.array(placement.next_stage if side == "next" else placement.previous_stage, np.int32)
        neighbour = np.where(subject.rank_of_stage[neighbour] != subject.rank_of_stage, neighbour, NONE)
        makers = np.flatnonzero(neighbour != NONE)
        return cls(neighbour, makers, neighbour[makers])


def _has_right_ends(subject: Subject, rows: RowIndex, crossings: dict[At, _Crossing]) -> bool:
    """Whether every send and receive has the right stage at its other end, and none is there twice."""
    program = subject.table
    assert isinstance(program, Program)
    peers = np.full((len(Op), program.num_stages), NONE, np.int32)
    for end in (end for ends in MESSAGES.values() for end in ends):
        peers[end] = crossings[peer_at(end)].neighbour
    num_right = 0
    for part in blocks(program.num_instructions):
        op = program.op[part]
        expected = peers.reshape(-1).take(op.astype(np.intp) * program.num_stages + program.stage[part])
        is_message = IS_MESSAGE.take(op)
        is_right = is_message & (expected != NONE) & (expected == program.peer[part])
        num_right += int(np.count_nonzero(is_right))
        if not np.array_equal(is_right, is_message):
            return False
    return num_right == sum(int(np.count_nonzero(rows.plane(op) != NONE)) for ends in MESSAGES.values() for op in ends)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Finds the row of each message among sends or receives."""

    subject: Subject
    findings: Findings
    shape: tuple[int, int, int]

    def locate(self, code: Op) -> Rows:
        """The row of each message's end, by what makes it; rows that make no sense and duplicates are findings."""
        where = np.full(self.shape, NONE, np.int32)
        rows, makers = self._valid_rows(code)
        table = self.subject.table
        place = (makers, table.microbatch[rows], table.slice[rows])
        where[place] = rows
        kept = where[place]
        for row, other in zip(rows[kept != rows].tolist(), kept[kept != rows].tolist(), strict=True):
            self._add_duplicate(row, other)
        return where

    def _valid_rows(self, code: Op) -> tuple[NDArray[Any], NDArray[Any]]:
        """The rows of an operation whose peer is the right neighbour on another rank, and the stages that make them."""
        table = self.subject.table
        assert isinstance(table, Program)
        rows = np.flatnonzero(table.op == code)
        side = NEIGHBOUR[peer_at(code)]
        neighbours = table.placement.next_stage if side == "next" else table.placement.previous_stage
        expected = np.array(neighbours, np.int64)[table.stage[rows]]
        right = (expected != NONE) & (table.peer[rows] == expected)
        leaves = self.subject.rank_of_stage[expected] != self.subject.rank[rows]
        for row in rows[~(right & leaves)].tolist():
            self._add_wrong_peer(row, side, neighbours[table.stage[row]])
        rows = rows[right & leaves]
        return rows, (table.stage if code.is_send else table.peer)[rows]

    def _add_wrong_peer(self, row: int, side: str, expected: int) -> None:
        table = self.subject.table
        assert isinstance(table, Program)
        stage, peer = int(table.stage[row]), int(table.peer[row])
        if expected == NONE:
            problem = f"has stage {peer} at its other end, but stage {stage} has no {side} stage"
        elif peer != expected:
            problem = f"has stage {peer} at its other end; expected stage {expected}, the {side} one of stage {stage}"
        else:
            problem = f"goes to stage {expected} on its own rank, where no message is needed"
        self.findings.add(row, problem, "Drop it" if expected == NONE or peer == expected else f"Name stage {expected}")

    def _add_duplicate(self, row: int, other: int) -> None:
        place = self.findings.subject.place(other, seen_from=row)
        self.findings.add(row, f"moves the same message as {place}", "Drop one of the two")


def _tell_missing_ends(findings: Findings, possible: Messages) -> None:
    """Say which ends lack their other end, or a result that somebody needs, and which results lack a message."""
    subject = findings.subject
    is_needed, is_sent, is_received = (end != NONE for end in (possible.producer, possible.send, possible.receive))
    for row in possible.send[is_sent & ~is_received].tolist():
        other, rank = _other_end(subject, row)
        findings.add(row, f"has no receive on rank {rank}; expected one {other} there", f"Add {other} on rank {rank}")
    for row in possible.receive[is_received & ~is_sent].tolist():
        other, rank = _other_end(subject, row)
        findings.add(row, f"has no send on rank {rank}; expected one {other} there", f"Add {other} on rank {rank}")
    unneeded = is_sent & is_received & ~is_needed
    for row in np.concatenate([possible.send[unneeded], possible.receive[unneeded]]).tolist():
        findings.add(row, "moves a result that no action makes or needs", "Drop both the send and the receive")
    unbrought = is_needed & ~is_sent & ~is_received
    for producer, row in zip(possible.producer[unbrought].tolist(), possible.consumer[unbrought].tolist(), strict=True):
        ranks = f"rank {subject.rank[producer]} and its receive on rank {subject.rank[row]}"
        problem = f"needs the result of {subject.place(producer)}, and no message brings it"
        findings.add(row, problem, f"Add the send on {ranks}")


def _other_end(subject: Subject, row: int) -> tuple[str, int]:
    """Text and rank of the instruction that a send or receive lacks."""
    table = subject.table
    assert isinstance(table, Program)
    mine = table.instruction(row)
    send, receive = MESSAGES[OPERATIONS[mine.op].message]
    partner = receive if mine.op is send else send
    other = Instruction(partner, mine.peer, mine.microbatch, mine.slice, mine.stage, 0)
    return str(other), int(subject.rank_of_stage[mine.peer])


def find_exchanges(barriers: Sequence[Barrier]) -> Messages:
    """Return what the members of tied groups send to each other: each reduction makes, moves and consumes it."""
    pairs = [
        pair for barrier in barriers if barrier.is_exchange for pair in permutations(map(min, barrier.rows.values()), 2)
    ]
    sender, receiver = np.array(pairs, np.int32).reshape(-1, 2).T
    return Messages(sender, sender, receiver, receiver)


def check_order(subject: Subject, parts: Sequence[Messages], exchanges: Messages, findings: Findings) -> Messages:
    """Prove that messages are received in the order of their sends, after their makers and before their consumers.

    Return them, without the exchanges, channel after channel, in the order of the sends. Of a channel, one difference
    is reported.
    """
    messages = join_messages(parts)
    send = np.concatenate([messages.send, exchanges.send])
    receive = np.concatenate([messages.receive, exchanges.receive])
    channel = np.concatenate([messages.channel(subject), exchanges.channel(subject)])
    by_send = np.argsort(channel * subject.num_rows + send)
    by_receive = np.argsort(channel * subject.num_rows + receive)
    differs = np.flatnonzero(by_send != by_receive)
    for index in first_of_each(channel[by_send[differs]], differs):
        first_sent, first_received = int(by_send[index]), int(by_receive[index])
        _add_swapped(findings, int(send[first_sent]), int(receive[first_received]))
    kept = by_send[by_send < len(messages.send)]
    in_order = Messages(messages.producer[kept], send[kept], receive[kept], messages.consumer[kept])
    _check_places(in_order, findings)
    return in_order


def _add_swapped(findings: Findings, send: int, receive: int) -> None:
    subject = findings.subject
    problem = f"is sent where rank {subject.rank[receive]} receives {subject.place(receive)}; a channel keeps its order"
    if IS_MESSAGE[subject.op[[send, receive]]].all():
        fix = f"Move {_other_end(subject, receive)[0]} before it, or swap the receives"
    else:
        one, other = sorted((int(subject.rank[send]), int(subject.rank[receive])))
        fix = f"Move the tied reduction after all messages between rank {one} and rank {other}, on both"
    findings.add(send, problem, fix)


def _check_places(messages: Messages, findings: Findings) -> None:
    """A message is made before its send and received before its consumer."""
    subject = findings.subject
    for index in np.flatnonzero(messages.send < messages.producer).tolist():
        row, maker = int(messages.send[index]), int(messages.producer[index])
        problem = f"is before {subject.place(maker, seen_from=row)}, which makes its message"
        findings.add(row, problem, f"Move it after {subject.text(maker)}")
    for index in np.flatnonzero(messages.receive > messages.consumer).tolist():
        row, consumer = int(messages.receive[index]), int(messages.consumer[index])
        problem = f"is after {subject.place(consumer, seen_from=row)}, which needs its message"
        findings.add(row, problem, f"Move it before {subject.text(consumer)}")
