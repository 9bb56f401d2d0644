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
    result = machine.run_to_halt()
    if result.is_complete:
        return
    machines = {name: Machine(subject, messages, barriers, name) for name in MODELS if name != model}
    models_passed = [str(name) for name, alternative in machines.items() if alternative.run_to_halt().is_complete]
    passes = ", ".join(models_passed) or "no other transport"
    fix = f"Lower its schedule with transport={str(model)!r}; as it is, the program passes under {passes}"
    stuck = _Stuck(subject, machine, result)
    for rank in range(subject.table.num_ranks):
        row = stuck.head(rank)
        if row is not None:
            subject.add(row, f"never ends under the transport {model}: it {stuck.reason(row)}", fix)


class Machine:
    """The rows of a program at which a rank can block, lanes of further rows, and what each row waits for.

    `messages` are in the order of channels, then of their sends; with `barriers` they are all that goes between ranks.
    In the methods, a row is one of the program, and a node is a row of the machine.
    """

    def __init__(
        self, subject: Subject, messages: Messages, barriers: Sequence[Barrier], model: TransportModel
    ) -> None:
        self.subject = subject
        self.messages = messages
        self.exchanges = find_exchanges(barriers)
        is_queued = model in (PAIR_FIFO, COALESCED)
        self._add_blocking_rows(subject.program, barriers, sends_block=not is_queued)
        if not is_queued:
            self._add_channels(sends_block=model == RENDEZVOUS)
            exchange_nodes = np.empty((0, 2), np.int64)
        elif model == PAIR_FIFO:
            exchange_nodes = self._add_pair_queues()
        else:
            exchange_nodes = self._add_groups()
        for barrier in barriers:
            self._add_barrier(barrier, exchange_nodes)

    def run_to_halt(self) -> Walk:
        """Run all nodes that can run."""
        return walk(self.offsets, self.waits, self.joined, np.zeros(len(self.waits)))

    def _add_blocking_rows(self, program: Program, barriers: Sequence[Barrier], *, sends_block: bool) -> None:
        """Start with the rows that can block: computations, collectives that join ranks, and sends if they block."""
        can_block = program.is_compute.copy()
        if sends_block:
            can_block |= IS_SEND[program.op]
        for barrier in barriers:
            for rows in barrier.rows.values():
                can_block[rows] = True
        self.blocking_rows = np.flatnonzero(can_block)
        num_before = np.concatenate([[0], np.cumsum(can_block)])
        self.node_of_row = np.where(can_block, num_before[:-1], NONE)
        """[num_rows] the node of each row of the program; `NONE` for a row that cannot block."""
        self.offsets = num_before[program.offsets]
        # A row is reached when the last row before it that can block has ended, on the same rank: an index below the
        # rank's offset is a row of the rank before.
        last_node = num_before[:-1] - 1
        self._last_node_before = np.where(last_node >= self.offsets[self.subject.rank], last_node, NONE)
        self.joined = program.joined[self.blocking_rows]
        self.waits = np.full((len(self.blocking_rows), 3), NONE, np.int32)
        """[num_nodes, 3] the nodes that a node waits for: two until rows are reached, then one by itself."""
        self.rows_shown = np.full((len(self.blocking_rows), 2), NONE, np.int32)
        """[num_nodes, 2] rows of the program, which messages name for the node; its first two waits are for these."""

    def last_node_before(self, rows: Ints) -> Int64s:
        """Return the nodes that must have ended for the rows to be reached; `NONE` where they are reached at once."""
        return np.where(rows == NONE, NONE, self._last_node_before[rows])

    def _await_nodes(self, rows: Ints, nodes: Int64s) -> None:
        """Let rows of the program wait for nodes to end."""
        self.waits[self.node_of_row[rows], 2] = nodes

    def _add_lanes(self, lengths: Ints, rows_shown: Int64s, rows_reached: Int64s, nodes_ended: Int64s) -> None:
        """Add nodes in lanes of the given lengths, which wait until rows are reached and until a node has ended.

        `rows_shown` are the rows that messages name for the node.
        """
        first = len(self.waits)
        reached = (self.last_node_before(rows_reached[:, column]) for column in (0, 1))
        waits = np.column_stack([*reached, nodes_ended])
        self.waits = np.concatenate([self.waits, waits.astype(np.int32)])
        self.rows_shown = np.concatenate([self.rows_shown, rows_shown.astype(np.int32)])
        self.joined = np.concatenate([self.joined, np.zeros(len(waits), np.bool_)])
        self.offsets = np.concatenate([self.offsets, first + np.cumsum(lengths)])

    def _add_channels(self, *, sends_block: bool) -> None:
        """Let consumers wait for their send, and a send that blocks until its receive is reached."""
        messages = self.messages
        send_nodes = self.node_of_row[messages.send]
        self._await_nodes(messages.consumer, send_nodes)
        if sends_block:
            self.waits[send_nodes, 0] = self.last_node_before(messages.receive)
            self.rows_shown[send_nodes, 0] = messages.receive

    def _add_pair_queues(self) -> Int64s:
        """Model one ordered queue per pair of ranks, as NCCL has: the n-th entries of both ends must be one message.

        A lane (rows that run one after another) is added per pair of ranks, with a node (a row of the lane) for each n.
        A node ends when both ranks have reached their n-th entries and these are the two ends of one message; a node
        whose entries are of two messages never ends, which is the deadlock that the proof looks for. An exchange, in
        which both ranks of a collective send and receive at once, is one entry. The rows that consume a message wait
        for its node. Return [num_exchanges, 2] the send row of each exchange, and its node.
        """
        messages, exchanges = self.messages, self.exchanges
        # Each exchange is there twice, once per direction; its first direction stands for both.
        is_first = exchanges.send < exchanges.receive
        entries = np.column_stack([
            np.concatenate([messages.send, exchanges.send[is_first]]),
            np.concatenate([messages.receive, exchanges.receive[is_first]]),
        ])  # fmt: skip
        entries.sort(axis=1)  # rows are stored rank after rank, so this is the lower rank's end and the higher one's
        ranks = self.subject.rank[entries].astype(np.int64)
        pair = ranks[:, 0] * self.subject.table.num_ranks + ranks[:, 1]
        # The entries of each pair of ranks, in the order of the lower rank's program and of the higher rank's program.
        by_low_end, by_high_end = (np.argsort(pair * self.subject.table.num_rows + entries[:, end]) for end in (0, 1))
        first = len(self.waits)
        nodes = first + np.arange(len(entries))
        _, lengths = np.unique(pair, return_counts=True)
        # Where the two orders first differ, the node waits for the next node of its own lane, which cannot end before
        # it: neither ends. That next node exists, since the two orders of a pair cannot differ for the first time at
        # their last entry. The minimum keeps the index of the very last node in range, which `np.where` does not
        # choose.
        next_nodes = np.minimum(nodes + 1, first + len(nodes) - 1)
        rows = np.column_stack([entries[by_low_end, 0], entries[by_high_end, 1]])
        node_to_await = np.where(by_low_end == by_high_end, NONE, next_nodes)
        self._add_lanes(lengths, rows_shown=rows, rows_reached=rows, nodes_ended=node_to_await)
        node_of_entry = np.empty(len(entries), np.int64)
        node_of_entry[by_low_end] = nodes
        self._await_nodes(messages.consumer, node_of_entry[: len(messages.send)])
        return np.column_stack([exchanges.send[is_first], node_of_entry[len(messages.send) :]])

    def _add_groups(self) -> Int64s:
        """Model sends and receives that a rank posts as one group, as torch's `batch_isend_irecv` does.

        A group is what a program marks as one, and each other message by itself; in a program without marks, it is what
        a rank sends and receives between two rows that can block. A lane (nodes that end one after
        another) is added per rank: for each group a start node, then a node for each send or receive. Such a node waits
        for the start of the group at the other end. An exchange, in which both ranks of a collective send and receive
        at once, is a group of its own. Return [num_exchanges, 2] the send row of each exchange, and its last node.
        """
        messages, exchanges = self.messages, self.exchanges
        num_messages, num_exchanges = len(messages.send), len(exchanges.send)
        # List all sends and receives, of messages and then of exchanges, and for each the index of its other end.
        rows = np.concatenate([messages.send, messages.receive, exchanges.send, exchanges.receive])
        parts = np.split(np.arange(len(rows)), np.cumsum([num_messages, num_messages, num_exchanges]))
        send_index, receive_index, exchange_send_index, exchange_receive_index = parts
        partner = np.concatenate([receive_index, send_index, exchange_receive_index, exchange_send_index])

        # Number the groups. In the order of rows, one opens where the row that can block before it is another one.
        order = np.argsort(rows, kind="stable")
        row, is_exchange = rows[order], order >= 2 * num_messages
        rank, node_before = self.subject.rank[row], self.last_node_before(row)
        opens = np.ones(len(row), np.bool_)
        opens[1:] = (rank[1:] != rank[:-1]) | (node_before[1:] != node_before[:-1])
        opens[1:] |= is_exchange[1:] != is_exchange[:-1]
        if self.subject.program.has_groups:
            mark = self.subject.program.group[row]
            opens[1:] |= (mark[1:] != mark[:-1]) | ((mark[1:] == 0) & ~is_exchange[1:])
        group = np.cumsum(opens) - 1
        group_of = np.empty(len(row), np.int64)  # by index, as `partner` is
        group_of[order] = group

        # Number the nodes: each group is a start node and one node per send or receive, the last of which is its end.
        first, size = len(self.waits), len(row) + int(np.count_nonzero(opens))
        start_node = first + np.flatnonzero(opens) + np.arange(size - len(row))
        end_node = np.append(start_node[1:], first + size) - 1
        node_of = np.empty(len(row), np.int64)
        node_of[order] = first + np.arange(len(row)) + group + 1
        # A start node waits until its rank has reached the group; the other nodes wait for the start at the other end.
        rows_shown, rows_reached = np.full((2, size, 2), NONE, np.int64)
        rows_shown[start_node - first, 0] = rows_reached[start_node - first, 0] = row[opens]
        rows_shown[node_of - first] = np.column_stack([rows, rows[partner]])
        nodes_ended = np.full(size, NONE, np.int64)
        nodes_ended[node_of - first] = start_node[group_of[partner]]
        lengths = np.bincount(rank, minlength=self.subject.table.num_ranks)
        lengths += np.bincount(rank[opens], minlength=self.subject.table.num_ranks)
        self._add_lanes(lengths, rows_shown, rows_reached, nodes_ended)
        self._await_nodes(messages.consumer, end_node[group_of[receive_index]])
        return np.column_stack([exchanges.send, end_node[group_of[exchange_send_index]]])

    def _add_barrier(self, barrier: Barrier, exchange_nodes: Int64s) -> None:
        """Add a lane with a node for each member, and one for each of its exchanges; the collective ends with the last.

        `exchange_nodes` [num_exchanges, 2] are the sends of all exchanges, and the nodes at which they end.
        """
        members = np.array([rows[0] for rows in barrier.rows.values()])
        # First the members, all of which must be reached; then the exchanges among them, which must have ended.
        is_of_barrier = np.isin(exchange_nodes[:, 0], members) & barrier.is_exchange
        exchanges = exchange_nodes[is_of_barrier, 1]
        size = len(members) + len(exchanges)
        rows_reached = np.full((size, 2), NONE, np.int64)
        rows_reached[: len(members), 0] = members
        nodes_ended = np.full(size, NONE, np.int64)
        nodes_ended[len(members) :] = exchanges
        self._add_lanes(np.array([size]), rows_reached, rows_reached, nodes_ended)
        rows = np.concatenate(list(barrier.rows.values()))
        self._await_nodes(rows, np.full(len(rows), len(self.waits) - 1))


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A machine that came to a halt, and the words for it; a node is open that has not ended."""

    subject: Subject
    machine: Machine
    walk: Walk

    def head(self, rank: int) -> int | None:
        """Return the row of the program at which a rank is stuck, None for a rank that has ended."""
        node = int(self.walk.reached[rank])
        return int(self.machine.blocking_rows[node]) if node < self.machine.offsets[rank + 1] else None

    def reason(self, row: int) -> str:
        """Return a text that says what a row waits for, at which a rank is stuck."""
        machine = self.machine
        op, node = Op(int(self.subject.table.op[row])), int(machine.node_of_row[row])
        if op.is_send:
            return f"waits for {self._describe(int(machine.rows_shown[node, 0]))}"
        if not op.is_compute:
            return f"waits for {self._describe_wait(self._first_open(int(machine.waits[node, 2])))}"
        send, awaited = self._message(row)
        open_node = self._first_open(awaited)
        if awaited < len(machine.blocking_rows):
            return f"waits for the message of {self._describe(send)}"
        if send in machine.rows_shown[open_node] and not self._is_crossing(open_node):
            return f"waits for the message of {self._describe_wait(open_node)}"
        text = self.subject.text(int(machine.rows_shown[open_node, 0]))
        problem = f"waits for the message of {self.subject.place(send)}, which is held up"
        return f"{problem}: {text} waits for {self._describe_wait(open_node)}"

    def _message(self, row: int) -> tuple[int, int]:
        """Return the send of the message that a computation or its partner waits for, and the node that is awaited."""
        messages, node_of_row = self.machine.messages, self.machine.node_of_row
        members = [row, row + 1] if self.subject.table.joined[row] else [row]
        for index in np.flatnonzero(np.isin(messages.consumer, members)).tolist():
            awaited = int(self.machine.waits[node_of_row[messages.consumer[index]], 2])
            if self._is_open(awaited):
                return int(messages.send[index]), awaited
        raise AssertionError(f"{self.subject.text(row)} waits for no message")

    def _first_open(self, node: int) -> int:
        """Return the first open node of the lane of a node."""
        lane = int(np.searchsorted(self.machine.offsets, node, side="right")) - 1
        return int(self.walk.reached[lane])

    def _is_crossing(self, node: int) -> bool:
        """Return whether a node is of a pair's queue, and its two entries are not the same message."""
        return self._open_wait(node) == 2 and self._first_open(int(self.machine.waits[node, 2])) == node

    def _describe_wait(self, node: int) -> str:
        """Return a text that says what the first open node of a queue's or a collective's lane waits for."""
        machine, place = self.machine, self.subject.place
        column = self._open_wait(node)
        row, partner = (int(shown) for shown in machine.rows_shown[node])
        if column < 2:
            return self._describe(row if column == 0 else partner)
        awaited = int(machine.waits[node, column])
        open_node = self._first_open(awaited)
        if row == NONE:  # a collective, whose exchange is an entry of a queue
            return self._describe_wait(open_node)
        if self._is_crossing(node):
            return f"its other end, but meets {place(partner)} in the queue of the two ranks"
        if self._open_wait(awaited) == 0:  # the rank at the other end has not come to it
            return self._describe(partner)
        open_row = int(machine.rows_shown[open_node, 0])
        return f"{place(partner)}, which is after the open group of {self.subject.text(open_row)}"

    def _open_wait(self, node: int) -> int:
        """Return the column of the first wait of a node that has not ended, `NONE` where all have."""
        waits = self.machine.waits[node]
        return next(
            (column for column in range(3) if waits[column] != NONE and self._is_open(int(waits[column]))), NONE
        )

    def _is_open(self, node: int) -> bool:
        return bool(self.walk.end[node] == NOT_RUN)

    def _describe(self, row: int) -> str:
        """Return the text and place of a row, and where its rank is stuck if that is elsewhere."""
        rank = int(self.subject.rank[row])
        head = self.head(rank)
        where = "" if head is None or head == row else f", while rank {rank} is at {self.subject.place(head)}"
        return self.subject.place(row) + where
