"""`CompiledPrograms`: what the modes of a pipeline run on one rank, each compiled when it first runs."""

from collections.abc import Callable

from penstock.execute.compile.program import CompiledProgram
from penstock.execute.control.agreement import Mode
from penstock.execute.transport.places import Places
from penstock.ir.program import Program

Key = tuple[Mode, int, int]
"""A mode, the number of its microbatches, and the most that a replica has."""


class CompiledPrograms:
    """The programs of one rank. `plan` says what a mode runs on so many microbatches; it is asked once for each."""

    def __init__(
        self, places: Places, plan: Callable[[Mode, int, int], Program], make: Callable[[Program], CompiledProgram]
    ) -> None:
        self._places = places
        self._plan = plan
        self._make = make
        self._compiled: dict[Key, CompiledProgram] = {}
        self._active: Program | None = None

    def of(self, mode: Mode, num_microbatches: int, most: int | None = None) -> CompiledProgram:
        """Return what a mode runs, from now on the program that errors speak of.

        `most` is the number of microbatches with which a replica gathers most, by default its own.
        """
        key = mode, num_microbatches, num_microbatches if most is None else most
        if key not in self._compiled:
            self._compiled[key] = self._make(self._plan(*key))
        self._active = self._compiled[key].program
        return self._compiled[key]

    def describe(self, number: int, row: int) -> str:
        """Return the text of the instruction in a row of the rank with this number; empty behind the last one."""
        if self._active is None:
            return ""
        rank = self._places.names.numbers.index(number) % self._places.pipeline.num_ranks
        first, end = self._active.offsets[rank : rank + 2]
        return str(self._active.instruction(int(first) + row)) if row < end - first else ""
