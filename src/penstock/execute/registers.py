"""Registers: where one rank's values live between its instructions, in as many places as the program has slots."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.execute.stages.carried import Trails
from penstock.execute.stages.stage import SavedForward
from penstock.execute.transport.messages import Incoming
from penstock.ir.instruction import Op
from penstock.ir.program import Program

SAVES = (Op.FORWARD,)
RECEIVES = (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)
SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


@dataclass(slots=True, eq=False)
class Registers:
    """Per slot of one rank what it holds, or None; all empty between steps."""

    saved: list[SavedForward | None]
    received: list[Incoming | None]
    inputs: list[Any]
    """Per receive slot, what arrived."""
    outgoing: list[Any]
    handed_on: dict[int, Any] = field(default_factory=dict)
    """Per producing row, what stays on this rank."""
    trails: Trails = field(default_factory=dict)
    """What slices have left for later ones."""

    @classmethod
    def for_rows(cls, program: Program, rows: range) -> "Registers":
        """Make the registers that these rows of a program need."""
        num_saved, num_received, num_sent = (
            max(_last_rows(program, rows, ops), default=-1) + 1 for ops in (SAVES, RECEIVES, SENDS)
        )
        return cls([None] * num_saved, [None] * num_received, [None] * num_received, [None] * num_sent)

    def clear(self) -> None:
        """Drop everything, as after a failure."""
        for column in (self.saved, self.received, self.inputs, self.outgoing):
            column[:] = [None] * len(column)
        self.handed_on.clear()
        self.trails.clear()

    def leftovers(self) -> int:
        """Count what is still held."""
        columns = (self.saved, self.received, self.inputs, self.outgoing)
        return len(self.handed_on) + len(self.trails) + sum(value is not None for column in columns for value in column)

    def name_leftovers(self, program: Program, rows: range) -> Iterator[str]:
        """Name what is still held after all rows have run, each by the instruction that left it there."""
        columns = (
            ("saved activation", SAVES, self.saved),
            ("received message", RECEIVES, self.received),
            ("received message", RECEIVES, self.inputs),
            ("unsent message", SENDS, self.outgoing),
        )
        for what, ops, column in columns:
            row_of_slot = _last_rows(program, rows, ops)
            for slot, value in enumerate(column):
                if value is not None:
                    yield f"{what} of {program.instruction(row_of_slot[slot])}"
        for row in self.handed_on:
            yield f"handed-on output of {program.instruction(row)}"
        for stage, microbatch in self.trails:
            yield f"what slices of microbatch {microbatch} left on stage {stage}"


def _last_rows(program: Program, rows: range, ops: tuple[Op, ...]) -> dict[int, int]:
    """Per slot, the last row with one of these operations that uses it."""
    return {int(program.slot[row]): row for row in rows if program.op[row] in ops}
