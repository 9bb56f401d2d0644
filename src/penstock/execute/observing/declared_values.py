"""Finds a call that leaves what its row does not declare, or does not leave what a later row reads.

    0F1 declares that it takes what 0RECV_F1 brought, keeps an activation, and makes what 0SEND_F1 sends

The columns of `ir.operations` say it; they are compared with the keys of `Step.values` after each call.
An activation that nobody takes would stay for the rest of the step; one that is gone too early fails at a later row.

Guarantees: what a call leaves is found behind that call, or behind its overlapped pair.
Relies on: the two computations of a pair are the only calls that run at one time.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import Lock

from penstock.errors import MAX_SHOWN, PipelineError
from penstock.execute.observing.observer import Around, Observer, once_per_program
from penstock.execute.ops.keys import Keys
from penstock.execute.step import Bound, Step
from penstock.ir.awaits import receive_of_row
from penstock.ir.deps import NONE, predecessors, stages_at
from penstock.ir.keeps import NOTHING, keeps
from penstock.ir.operations import KEPT, MESSAGES, OPERATIONS, Lane, Op, peer_at
from penstock.ir.program import Program


class DeclaredValues(Observer):
    """Compares the values of one rank with its rows, after every call."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._declared = once_per_program(partial(Declared, rank=rank))
        self._expected: set[int] = set()
        self._num_running = 0
        self._lock = Lock()

    def begin(self, step: Step) -> None:
        self._expected, self._num_running = set(), 0

    def around(self, program: Program, bound: Bound) -> Around:
        declared = self._declared(program)
        freed_keys, left_keys = (set(), set()) if bound.awaits is not None else declared.of(bound.row)
        text = str(program.instruction(bound.row))
        return partial(self._following, declared.keys, text, freed_keys, left_keys)

    @contextmanager
    def _following(
        self, keys: Keys, text: str, freed_keys: Set[int], left_keys: Set[int], step: Step
    ) -> Iterator[None]:
        with self._lock:
            self._num_running += 1
        yield
        with self._lock:
            self._num_running -= 1
            self._expected = (self._expected - freed_keys) | left_keys
            # While the other computation of an overlapped pair runs, it has done only a part of its work.
            if not self._num_running:
                self._compare(keys, text, step)

    def _compare(self, keys: Keys, text: str, step: Step) -> None:
        present_keys = step.values.keys()
        for stray_keys, problem in (
            (present_keys - self._expected, "there is left what no row declares"),
            (self._expected - present_keys, "there is no more what a later row reads"),
        ):
            if stray_keys:
                names = ", ".join(keys.name(key) for key in sorted(stray_keys)[:MAX_SHOWN])
                raise PipelineError(f"after {text} {problem}: {names}", rank=self._rank)


class Declared:
    """The values that the rows of one rank declare to take and to leave."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.keys = program, Keys(program, rank)
        producers = predecessors(program)[:, 0]
        self._source, self._receive = producers, receive_of_row(program, producers)
        self._keeps = keeps(program)

    def of(self, row: int) -> tuple[set[int], set[int]]:
        """Return the keys that a row takes, and those that it puts."""
        program, keys = self.program, self.keys
        operation = OPERATIONS[Op(int(program.op[row]))]
        frees, makes = set(operation.frees), set(operation.makes)
        freed_keys, left_keys = set(), set()
        if operation.lane is Lane.RECEIVE:
            left_keys.add(keys.message_of(row))
        elif self._receive[row] != NONE:
            freed_keys.add(keys.message_of(int(self._receive[row])))
        elif self._source[row] != NONE and MESSAGES.keys() & frees:
            freed_keys.add(keys.result_of(int(self._source[row])))
        if KEPT & frees:
            freed_keys.add(keys.activation_of(row))
        if self._keeps[row] != NOTHING or (KEPT & makes and not operation.begins_keeping):
            left_keys.add(keys.activation_of(row))
        for value in MESSAGES.keys() & makes:
            send, _ = MESSAGES[value]
            if stages_at(program.placement, peer_at(send))[program.stage[row]] != NONE:
                left_keys.add(keys.result_of(row))
        return freed_keys, left_keys
