"""Proof 3, first half: on every channel the sends and the receives are the same messages in the same order.

A message is known by its direction (output or gradient), the stage that makes it, microbatch and slice. The members of
a tied group send their gradients to each other on the same channels: such an exchange keeps its place among them.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from penstock.ir.deps import NONE, RowIndex, peers_of_messages, stages_at
from penstock.ir.hot import Int32s, Int64s, blocks
from penstock.ir.instruction import Instruction
from penstock.ir.operations import IS_MESSAGE, MESSAGES, OPERATIONS, At, Op, makers, peer_at
from penstock.proofs.collectives import Barrier
from penstock.proofs.order import bounds_of_stage
from penstock.proofs.report import Subject, first_of_each

NEIGHBOUR = {At.DOWNSTREAM: "next", At.UPSTREAM: "previous"}
"""The word for the stage at the other end of a message, which is a neighbor on the route."""


class Messages(NamedTuple):
    """The four rows of every message, [num_messages] each."""

    producer: Int32s
    send: Int32s
    receive: Int32s
    consumer: Int32s

    def channel(self, subject: Subject) -> Int64s:
        """[num_messages] the number of the message's channel: sending rank x num_ranks + receiving rank."""
        channel: Int64s = subject.rank[self.send].astype(np.int64)
        channel *= subject.table.num_ranks
        channel += subject.rank[self.receive]
        return channel


def count_messages(subject: Subject, predecessor_rows: Int32s) -> int:
    """Return how many results cross from rank to rank."""
    begin, end = bounds_of_stage(subject.schedule)
    count = 0
    for part in blocks(len(predecessor_rows)):
        source, stage = predecessor_rows[part, 0], subject.schedule.stage[part]
        is_elsewhere = (source < begin.take(stage)) | (source >= end.take(stage))
        count += int(np.count_nonzero(is_elsewhere & (source != NONE)))
    return count


def find_messages(subject: Subject, rows: RowIndex) -> list[Messages]:
    """Prove that every send has its receive, its producer and its consumer; return the messages that have all four.

    `rows` are those of the program. There is one entry per stage and direction; most are views of the index.
    """
    messages = []
    for possible in _possible_messages(subject, rows):
        is_needed, is_sent, is_received = (end != NONE for end in possible[:3])
        has_all_ends = is_needed & is_sent & is_received
        if has_all_ends.all():
            messages.append(possible)
            continue
        if not np.array_equal(has_all_ends, is_needed | is_sent | is_received):
            _tell_missing_ends(subject, possible)
        messages.append(Messages(*(end[has_all_ends] for end in possible)))
    return messages


def join_messages(parts: Sequence[Messages]) -> Messages:
    """Put messages one after the other."""
    none = Messages(*np.empty((4, 0), np.int32))
    return Messages(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))


def _possible_messages(subject: Subject, rows: RowIndex) -> Iterator[Messages]:
    """Yield the rows of every message that could be, `NONE` where a row is missing; one entry per direction and stage.

    Outputs come first, then gradients, each by the stage that makes them.
    """
    peers = peers_of_messages(subject.table.placement)
    peers = np.where(subject.rank_of_stage[peers] != subject.rank_of_stage, peers, NONE)
    has_right_ends = _has_right_ends(subject, rows, peers)
    for send, receive in MESSAGES.values():
        action_rows = rows.plane(makers(OPERATIONS[send].reads[0].value)[0])
        send_rows, receive_rows = (
            rows.plane(op) if has_right_ends else _locate(subject, op, rows.shape) for op in (send, receive)
        )
        for maker in np.flatnonzero(peers[send] != NONE).tolist():
            receiver = int(peers[send, maker])
            yield Messages(
                producer=action_rows[maker].reshape(-1),
                send=send_rows[maker].reshape(-1),
                receive=receive_rows[receiver if has_right_ends else maker].reshape(-1),  # `_locate` names the maker
                consumer=action_rows[receiver].reshape(-1),
            )


def _has_right_ends(subject: Subject, rows: RowIndex, peers: Int32s) -> bool:
    """Return whether every send and receive has the right stage at its other end, and none is there twice."""
    program = subject.program
    num_right = 0
    for part in blocks(program.num_instructions):
        op = program.op[part]
        expected = peers.reshape(-1).take(op.astype(np.intp) * program.num_stages + program.stage[part])
        is_message = IS_MESSAGE.take(op)
        is_right = is_message & (expected != NONE) & (expected == program.peer[part])
        num_right += int(np.count_nonzero(is_right))
        if not np.array_equal(is_right, is_message):
            return False
    planes = [rows.plane(op) for send_and_receive in MESSAGES.values() for op in send_and_receive]
    return num_right == sum(int(np.count_nonzero(plane != NONE)) for plane in planes)


def _locate(subject: Subject, end: Op, shape: tuple[int, int, int]) -> Int32s:
    """[num_stages, num_microbatches, num_slices] the row of each message's send or receive, by what makes the message.

    A violation is added for each duplicate, and where the peer is not the right neighbor, on another rank. `end` is the
    operation, a send or a receive.
    """
    program, at = subject.program, peer_at(end)
    rows = np.flatnonzero(program.op == end)
    expected = stages_at(program.placement, at)[program.stage[rows]]
    is_right = (expected != NONE) & (program.peer[rows] == expected)
    is_right &= subject.rank_of_stage[expected] != subject.rank[rows]
    for row, stage in zip(rows[~is_right].tolist(), expected[~is_right].tolist(), strict=True):
        _add_wrong_peer(subject, row, NEIGHBOUR[at], stage)
    rows = rows[is_right]
    place = ((program.stage if end.is_send else program.peer)[rows], program.microbatch[rows], program.slice[rows])
    row_of_message = np.full(shape, NONE, np.int32)
    row_of_message[place] = rows
    located = row_of_message[place]
    for row, duplicate_of in zip(rows[located != rows].tolist(), located[located != rows].tolist(), strict=True):
        subject.add(
            row, f"moves the same message as {subject.place(duplicate_of, seen_from=row)}", "Drop one of the two"
        )
    return row_of_message


def _add_wrong_peer(subject: Subject, row: int, side: str, expected: int) -> None:
    program = subject.program
    stage, peer = int(program.stage[row]), int(program.peer[row])
    if expected == NONE:
        problem = f"has stage {peer} at its other end, but stage {stage} has no {side} stage"
    elif peer != expected:
        problem = f"has stage {peer} at its other end; expected stage {expected}, the {side} one of stage {stage}"
    else:
        problem = f"goes to stage {expected} on its own rank, where no message is needed"
    subject.add(row, problem, "Drop it" if expected == NONE or peer == expected else f"Name stage {expected}")


def _tell_missing_ends(subject: Subject, possible: Messages) -> None:
    """Add a violation for each send or receive that lacks the other or a use, and each result without a message."""
    is_needed, is_sent, is_received = (end != NONE for end in possible[:3])
    lone = {"receive": possible.send[is_sent & ~is_received], "send": possible.receive[is_received & ~is_sent]}
    for lacking, row in ((lacking, row) for lacking, rows in lone.items() for row in rows.tolist()):
        missing, rank = _other_end(subject, row)
        subject.add(
            row, f"has no {lacking} on rank {rank}; expected one {missing} there", f"Add {missing} on rank {rank}"
        )
    unneeded = is_sent & is_received & ~is_needed
    for row in np.concatenate([possible.send[unneeded], possible.receive[unneeded]]).tolist():
        subject.add(row, "moves a result that no action makes or needs", "Drop both the send and the receive")
    unbrought = is_needed & ~is_sent & ~is_received
    producers, consumers = possible.producer[unbrought], possible.consumer[unbrought]
    for producer, row in zip(producers.tolist(), consumers.tolist(), strict=True):
        ranks = f"rank {subject.rank[producer]} and its receive on rank {subject.rank[row]}"
        problem = f"needs the result of {subject.place(producer)}, and no message brings it"
        subject.add(row, problem, f"Add the send on {ranks}")


def _other_end(subject: Subject, row: int) -> tuple[str, int]:
    """Return the text and the rank of the instruction that a send or receive lacks."""
    instruction = subject.program.instruction(row)
    send, receive = MESSAGES[OPERATIONS[instruction.op].message]
    partner = receive if instruction.op is send else send
    missing = Instruction(partner, instruction.peer, instruction.microbatch, instruction.slice, instruction.stage, 0)
    return str(missing), int(subject.rank_of_stage[instruction.peer])


def find_exchanges(barriers: Sequence[Barrier]) -> Messages:
    """Return the messages that members of tied groups send to each other; a reduction makes, moves and consumes it."""
    row_pairs = [
        row_pair
        for barrier in barriers
        if barrier.is_exchange
        for row_pair in permutations(map(min, barrier.rows.values()), 2)
    ]
    sender, receiver = np.array(row_pairs, np.int32).reshape(-1, 2).T
    return Messages(sender, sender, receiver, receiver)


def check_order(subject: Subject, parts: Sequence[Messages], exchanges: Messages) -> Messages:
    """Prove that each channel's receives are in the order of its sends; add a violation where they are not.

    A channel is the ordered queue of messages from one rank to one other rank. `parts` are its plain messages, and
    `exchanges` the sends and receives of tied gradients, which use the same channels. It is also proved that a send
    comes after the row that makes its message, and a receive before the row that consumes it. Only the first difference
    of a channel is reported. Return the messages of `parts`, channel after channel, in the order of their sends.
    """
    messages = join_messages(parts)
    send = np.concatenate([messages.send, exchanges.send])
    receive = np.concatenate([messages.receive, exchanges.receive])
    channel = np.concatenate([messages.channel(subject), exchanges.channel(subject)])
    # Sort all messages by channel and send, and by channel and receive: the two orders must be the same.
    by_send = np.argsort(channel * subject.table.num_rows + send)
    by_receive = np.argsort(channel * subject.table.num_rows + receive)
    differs = np.flatnonzero(by_send != by_receive)
    for index in first_of_each(channel[by_send[differs]], differs):
        first_sent, first_received = int(by_send[index]), int(by_receive[index])
        _add_swapped(subject, int(send[first_sent]), int(receive[first_received]))
    messages_by_send = by_send[by_send < len(messages.send)]
    in_order = Messages(*(end[messages_by_send] for end in messages))
    # Within a rank, a message is made before its send and received before its consumer.
    for index in np.flatnonzero(in_order.send < in_order.producer).tolist():
        row, maker = int(in_order.send[index]), int(in_order.producer[index])
        problem = f"is before {subject.place(maker, seen_from=row)}, which makes its message"
        subject.add(row, problem, f"Move it after {subject.text(maker)}")
    for index in np.flatnonzero(in_order.receive > in_order.consumer).tolist():
        row, consumer = int(in_order.receive[index]), int(in_order.consumer[index])
        problem = f"is after {subject.place(consumer, seen_from=row)}, which needs its message"
        subject.add(row, problem, f"Move it before {subject.text(consumer)}")
    return in_order


def _add_swapped(subject: Subject, send: int, receive: int) -> None:
    problem = f"is sent where rank {subject.rank[receive]} receives {subject.place(receive)}; a channel keeps its order"
    if IS_MESSAGE[subject.table.op[[send, receive]]].all():
        fix = f"Move {_other_end(subject, receive)[0]} before it, or swap the receives"
    else:
        low_rank, high_rank = sorted((int(subject.rank[send]), int(subject.rank[receive])))
        fix = f"Move the tied reduction after all messages between rank {low_rank} and rank {high_rank}, on both"
    subject.add(send, problem, fix)
