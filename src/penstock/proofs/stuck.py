"""Proves that a program ends under a transport model, or reports where each rank is stuck and what it waits for."""

from dataclasses import dataclass

import numpy as np

from penstock.ir.deps import NONE
from penstock.ir.operations import Op
from penstock.ir.program import Program
from penstock.ir.transports import MODELS, TransportModel
from penstock.ir.walk import NOT_RUN, Walk
from penstock.proofs.report import Findings, Subject
from penstock.proofs.transports import Machine, Traffic


def check_transport(subject: Subject, traffic: Traffic, model: TransportModel, findings: Findings) -> bool:
    """Prove that the program ends under the model; else add one violation per rank that cannot go on."""
    machine = Machine(subject, traffic, model)
    walked = machine.run()
    if walked.is_complete:
        return True
    others = [other for other in MODELS if other != model and Machine(subject, traffic, other).run().is_complete]
    passes = ", ".join(str(other) for other in others) or "no other transport"
    fix = f"Lower its schedule with transport={str(model)!r}; as it is, the program passes under {passes}"
    stuck = _Stuck(subject, machine, walked)
    for rank in range(subject.table.num_ranks):
        row = stuck.head(rank)
        if row is not None:
            findings.add(row, f"never ends under the transport {model}: it {stuck.reason(row)}", fix)
    return False


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
        """What the row at which a rank is stuck waits for."""
        program, machine = self.subject.table, self.machine
        assert isinstance(program, Program)
        op, at = Op(int(program.op[row])), int(machine.lane_row[row])
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
        """What the first open row of a queue's or a collective's lane waits for."""
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
