"""`Keys`: numbers of the values that live between two rows of a rank, given when a program is compiled.

    kept        what a stage keeps of a forward for its backward; one after another takes the same slot
    message     a receive that is posted, then what it has brought
    made        what a row made for its send, or for another stage of this rank

An integer is looked up in a sixth of the time that a tuple with an enum takes. Errors and checks ask
what a number stands for.
"""

import numpy as np

from penstock.ir.operations import BEGINS_KEEPING, IS_RECEIVE, Flags
from penstock.ir.program import Program


class Keys:
    """The keys of one rank's values in a program."""

    def __init__(self, program: Program, rank: int) -> None:
        first, end = map(int, program.offsets[rank : rank + 2])
        self._program, self.first_row = program, first
        num_kept = self._num_slots(BEGINS_KEEPING, end)
        num_messages = self._num_slots(IS_RECEIVE, end)
        self.activations = range(num_kept)
        self.messages = range(num_kept, num_kept + num_messages)
        self.results = range(self.messages.stop, self.messages.stop + end - first)

    def _num_slots(self, flags: Flags, end: int) -> int:
        rows = slice(self.first_row, end)
        slots = self._program.slot[rows][flags[self._program.op[rows]]].tolist()
        return 1 + max(slots, default=-1)

    def activation_of(self, row: int) -> int:
        """Return the key of what the forward of a row's stage, microbatch and slice keeps."""
        return int(self._program.slot[row])

    def message_of(self, receive: int) -> int:
        """Return the key of what a receive brings."""
        return self.messages.start + int(self._program.slot[receive])

    def result_of(self, row: int) -> int:
        """Return the key of what a row makes."""
        return self.results.start + row - self.first_row

    def name(self, key: int) -> str:
        """Say what a key stands for, by the instruction that left it there."""
        if key in self.activations:
            return f"saved activation of {self._last_user(BEGINS_KEEPING, key)}"
        if key in self.messages:
            return f"received message of {self._last_user(IS_RECEIVE, key - self.messages.start)}"
        if key in self.results:
            return f"result of {self._program.instruction(self.first_row + key - self.results.start)}"
        return f"value {key}"

    def _last_user(self, flags: Flags, slot: int) -> str:
        """The last row that takes a slot."""
        program, end = self._program, self.first_row + len(self.results)
        rows = self.first_row + np.flatnonzero(
            flags[program.op[self.first_row : end]] & (program.slot[self.first_row : end] == slot)
        )
        return str(program.instruction(int(rows[-1])))
