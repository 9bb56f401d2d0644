"""Proof 3, first half: on every channel the sends and the receives are the same messages in the same order.

A message is known by its direction (output or gradient), the stage that makes it, microbatch and slice.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.check.order import Actions
from penstock.check.report import Findings, Subject, first_of_each
from penstock.ir.action import Kind
from penstock.ir.deps import NONE
from penstock.ir.instruction import Instruction, Op
from penstock.ir.program import Program

Rows = NDArray[np.int64]
NEIGHBOUR = {Op.SEND_FORWARD: "next", Op.RECEIVE_BACKWARD: "next"}
"""Which neighbour on the route is at the other end; "previous" for the other two."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The four rows of every message, [num_messages] each, channel after channel in the order of the sends."""

    producer: Rows
    send: Rows
    receive: Rows
    consumer: Rows
    channel: Rows
    """Sending rank x num_ranks + receiving rank."""


def count_messages(actions: Actions, before: NDArray[np.int32]) -> int:
    """Return how many results cross from rank to rank."""
    return len(_crossing(actions, before))


def _crossing(actions: Actions, before: NDArray[np.int32]) -> NDArray[np.intp]:
    source = before[:, 0]
    return np.flatnonzero((source != NONE) & (actions.rank[source] != actions.rank))


def match_messages(
    subject: Subject, actions: Actions, before: NDArray[np.int32], findings: Findings
) -> Messages | None:
    """Prove that sends and receives match each other, their producers and consumers; None if they do not."""
    table = subject.table
    assert isinstance(table, Program)
    num_found = len(findings.violations)
    shape = (2, table.num_stages, table.num_microbatches, table.num_slices)
    ends = _Ends(subject, findings, shape)
    send = ends.locate(Op.SEND_FORWARD, Op.SEND_BACKWARD)
    receive = ends.locate(Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)
    consumers = _crossing(actions, before)
    producers = before[consumers, 0]
    schedule = actions.schedule
    direction = (schedule.kind[consumers] != Kind.FORWARD).astype(np.int64)
    columns = (direction, schedule.stage[producers], schedule.microbatch[producers], schedule.slice[producers])
    identity = np.ravel_multi_index(columns, shape)
    producer, consumer = np.full_like(send, NONE), np.full_like(send, NONE)
    producer[identity], consumer[identity] = actions.row[producers], actions.row[consumers]

    _check_both_ends(findings, producer, send, receive)
    for row in actions.row[consumers[(send[identity] == NONE) & (receive[identity] == NONE)]].tolist():
        _add_unbrought(subject, actions, before, findings, row)
    matched = np.flatnonzero((send != NONE) & (receive != NONE) & (producer != NONE))
    messages = _in_channel_order(subject, matched, _Tables(producer, send, receive, consumer), findings)
    _check_places(messages, findings)
    return messages if len(findings.violations) == num_found else None


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """The rows of every possible message, `NONE` where there is none."""

    producer: Rows
    send: Rows
    receive: Rows
    consumer: Rows


@dataclass(frozen=True, slots=True)
class _Ends:
    """Finds the row of each message among sends or receives."""

    subject: Subject
    findings: Findings
    shape: tuple[int, int, int, int]

    def locate(self, forward: Op, backward: Op) -> Rows:
        """[num possible messages] the row of this end; rows that make no sense and duplicates are findings."""
        where = np.full(int(np.prod(self.shape)), NONE, np.int64)
        for direction, code in enumerate((forward, backward)):
            rows, makers = self._valid_rows(code)
            table = self.subject.table
            columns = (np.full_like(rows, direction), makers, table.microbatch[rows], table.slice[rows])
            identity = np.ravel_multi_index(columns, self.shape)
            where[identity] = rows
            kept = where[identity]
            for row, other in zip(rows[kept != rows].tolist(), kept[kept != rows].tolist(), strict=True):
                self._add_duplicate(row, other)
        return where

    def _valid_rows(self, code: Op) -> tuple[NDArray[Any], NDArray[Any]]:
        """The rows of an operation whose peer is the right neighbour on another rank, and the stages that make them."""
        table = self.subject.table
        assert isinstance(table, Program)
        rows = np.flatnonzero(table.op == code)
        side = NEIGHBOUR.get(code, "previous")
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


def _check_both_ends(findings: Findings, producer: Rows, send: Rows, receive: Rows) -> None:
    """Every end has its other end, and a result that somebody needs."""
    subject = findings.subject
    lone_sends = np.flatnonzero((send != NONE) & (receive == NONE))
    lone_receives = np.flatnonzero((send == NONE) & (receive != NONE))
    for row in send[lone_sends].tolist():
        other, rank = _other_end(subject, row)
        findings.add(row, f"has no receive on rank {rank}; expected one {other} there", f"Add {other} on rank {rank}")
    for row in receive[lone_receives].tolist():
        other, rank = _other_end(subject, row)
        findings.add(row, f"has no send on rank {rank}; expected one {other} there", f"Add {other} on rank {rank}")
    unneeded = np.flatnonzero((send != NONE) & (receive != NONE) & (producer == NONE))
    for row in np.concatenate([send[unneeded], receive[unneeded]]).tolist():
        findings.add(row, "moves a result that no action makes or needs", "Drop both the send and the receive")


def _other_end(subject: Subject, row: int) -> tuple[str, int]:
    """Text and rank of the instruction that a send or receive lacks."""
    table = subject.table
    assert isinstance(table, Program)
    mine = table.instruction(row)
    partner = {
        Op.SEND_FORWARD: Op.RECEIVE_FORWARD,
        Op.RECEIVE_FORWARD: Op.SEND_FORWARD,
        Op.SEND_BACKWARD: Op.RECEIVE_BACKWARD,
        Op.RECEIVE_BACKWARD: Op.SEND_BACKWARD,
    }[mine.op]
    other = Instruction(partner, mine.peer, mine.microbatch, mine.slice, mine.stage, 0)
    return str(other), int(subject.rank_of_stage[mine.peer])


def _add_unbrought(subject: Subject, actions: Actions, before: NDArray[np.int32], findings: Findings, row: int) -> None:
    action = int(np.searchsorted(actions.row, row))
    producer = int(actions.row[before[action, 0]])
    problem = f"needs the result of {subject.place(producer)}, and no message brings it"
    ranks = f"rank {subject.rank[producer]} and its receive on rank {subject.rank[row]}"
    findings.add(row, problem, f"Add the send on {ranks}")


def _in_channel_order(subject: Subject, matched: NDArray[Any], tables: _Tables, findings: Findings) -> Messages:
    """Sort messages by channel and send; where the receives have another order, say so once per channel."""
    send, receive = tables.send[matched], tables.receive[matched]
    channel = subject.rank[send].astype(np.int64) * subject.table.num_ranks + subject.rank[receive]
    by_send = np.argsort(channel * subject.num_rows + send)
    by_receive = np.argsort(channel * subject.num_rows + receive)
    differs = np.flatnonzero(by_send != by_receive)
    for index in first_of_each(channel[by_send[differs]], differs):
        first_sent, first_received = int(by_send[index]), int(by_receive[index])
        _add_swapped(findings, int(send[first_sent]), int(receive[first_received]))
    order = matched[by_send]
    return Messages(
        tables.producer[order], tables.send[order], tables.receive[order], tables.consumer[order], channel[by_send]
    )


def _add_swapped(findings: Findings, send: int, receive: int) -> None:
    subject = findings.subject
    findings.add(
        send,
        f"is sent where rank {subject.rank[receive]} receives {subject.place(receive)}; a channel keeps its order",
        f"Move {_other_end(subject, receive)[0]} in front of it, or swap the receives",
    )


def _check_places(messages: Messages, findings: Findings) -> None:
    """A message is made before its send and received before its consumer."""
    subject = findings.subject
    for index in np.flatnonzero(messages.send < messages.producer).tolist():
        row, maker = int(messages.send[index]), int(messages.producer[index])
        problem = f"stands in front of {subject.place(maker, seen_from=row)}, which makes its message"
        findings.add(row, problem, f"Move it behind {subject.text(maker)}")
    for index in np.flatnonzero(messages.receive > messages.consumer).tolist():
        row, consumer = int(messages.receive[index]), int(messages.consumer[index])
        problem = f"stands behind {subject.place(consumer, seen_from=row)}, which needs its message"
        findings.add(row, problem, f"Move it in front of {subject.text(consumer)}")
