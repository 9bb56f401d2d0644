"""What must hold of a rank's registers after every call of a step: they hold what the program says, and nothing else.

    saved      from the forward of a place to its whole backward, or its weight gradient
    received   from posting a receive to the computation on the message, with the wait in between
    made       from a computation to the send of what it made, or to the one on another stage of this rank that uses it
    carried    of a stage and microbatch, from its first slice's forward to that slice's backward (or the last forward)

The model here follows the rows of the program and knows nothing of how calls move values. The pipelines of
tests/exactness and of tests/random_models have it as an observer; all others run as users' do, without one.
"""

import threading
from contextlib import contextmanager
from functools import partial

from penstock.execute.observing.observer import Observer
from penstock.execute.ops.keys import Keys
from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.stages.passes import SavedForward
from penstock.execute.stages.recompute import Checkpoint
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op

COLUMNS = ("saved", "received", "made", "carried")
MAY_BE_EMPTY = ("received", "carried")
"""A stage may give nothing but None to the next one, and its layers may carry nothing."""


class Wrong(AssertionError):
    """The registers are not as the program says."""


class Invariants(Observer):
    """Compares the registers with the program after every call."""

    needs_all_ranks = True  # what it finds fails the step, and so does a mistake of its own

    def __init__(self):
        self.held = {}
        """By column, the slots (or rows) that hold a value, and for `saved` what kind of value."""
        self.num_checks = 0
        self._lock = threading.Lock()
        self._num_running = 0
        self._rules = self._keys = None

    def begin(self, step):
        self.held = {column: {} for column in COLUMNS}
        self._num_running = 0
        self._check(step, "before the step")

    def around(self, program, bound):
        if self._rules is None or self._rules.program is not program:
            self._rules = Rules(program)
        keys = Keys(program, int(program.rank_of_row[bound.row]))
        return partial(self._following, keys, str(program.instruction(bound.row)), list(self._rules.effects(bound)))

    @contextmanager
    def _following(self, keys, name, effects, step):
        with self._lock:
            self._keys = keys
            self._num_running += 1
        yield
        with self._lock:
            self._num_running -= 1
            for column, key, value in effects:
                self._apply(name, column, key, value)
            if not self._num_running:  # else the other computation of a pair has done a part of its work
                self._check(step, f"after {name}")

    def end(self, step, failed):
        if not failed and any(self.held.values()):
            raise Wrong(f"after the step the program still holds {self.held}")

    def _apply(self, name, column, key, value):
        held = self.held[column]
        if value is None:
            if key not in held:
                raise Wrong(f"{name} frees {column}[{key}], which is empty")
            del held[key]
        else:
            if key in held and (held[key], value) not in CHANGES:
                raise Wrong(f"{name} fills {column}[{key}], which holds {held[key]} already")
            held[key] = value

    def _check(self, step, when):
        self.num_checks += 1
        for column in COLUMNS:
            found = self._filled(step, column)
            expected = self.held[column].keys()
            if found - expected or (column not in MAY_BE_EMPTY and expected - found):
                raise Wrong(f"{when} {column} holds {sorted(found)}, the program says {sorted(expected)}")
        for slot, kind in self.held["saved"].items():
            saved = step.values[slot]
            if not isinstance(saved, KINDS[kind]):
                raise Wrong(f"{when} saved[{slot}] is a {type(saved).__name__}, the program says {kind}")

    def _filled(self, step, column):
        """Return where a column holds something: slots, or rows of the rank from 0."""
        if column == "carried":
            return {key for key, value in step.carried.items() if value is not None}
        if self._keys is None:
            return set(step.values)
        keys = {"saved": self._keys.activations, "received": self._keys.messages, "made": self._keys.results}[column]
        start = keys.start - (self._keys.first_row if column == "made" else 0)
        may_be_none = column == "saved"
        # What is no key at all counts as made.
        last = keys.stop if column != "made" else 1_000_000
        found = {key: value for key, value in step.values.items() if keys.start <= key < last}
        return {key - start for key, value in found.items() if may_be_none or value is not None}


KINDS = {
    "checkpoint": Checkpoint,
    "activation": SavedForward,
    "weight gradient inputs": WeightInputs,
}
CHANGES = {("checkpoint", "activation"), ("activation", "weight gradient inputs"), ("posted", "message")}
"""What a slot may hold after what, while it is filled."""


class Rules:
    """What each call fills and frees, from the program alone."""

    def __init__(self, program):
        self.program = program
        self.sources = predecessors(program)[:, 0]
        self.is_training = not program.is_forward_only
        self.run_again = {self._place(row) for row in (program.op == Op.RECOMPUTE).nonzero()[0]}

    def effects(self, bound):
        """List what a call does: (column, key, what it then holds or None)."""
        row = bound.row
        instruction = self.program.instruction(row)
        if bound.awaits is not None:
            if Op(int(self.program.op[bound.awaits])).is_receive:
                yield "received", int(self.program.slot[bound.awaits]), "message"
            return
        op, slot = instruction.op, instruction.slot
        if op.is_send:
            yield "made", int(self.sources[row]), None
        elif op.is_receive:
            yield "received", slot, "posted"
        elif op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            yield from self._takes(row)
            yield from self._makes(row, instruction)
            yield from self._carries(instruction)
        if op is Op.FORWARD and self.is_training:
            yield "saved", slot, "checkpoint" if self._place(row) in self.run_again else "activation"
        elif op is Op.RECOMPUTE:
            yield "saved", slot, "activation"
        elif op is Op.BACKWARD_INPUT:
            yield "saved", slot, "weight gradient inputs"
        elif op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            yield "saved", slot, None

    def _place(self, row):
        program = self.program
        return tuple(int(column[row]) for column in (program.stage, program.microbatch, program.slice))

    def _carries(self, instruction):
        place, slice_index = (instruction.stage, instruction.microbatch), instruction.slice
        is_forward, last = instruction.op is Op.FORWARD, self.program.num_slices - 1
        if last == 0 or instruction.op is Op.RECOMPUTE:
            return
        if is_forward and slice_index == 0:
            yield "carried", place, "carried values"
        if (slice_index == 0 and not is_forward) if self.is_training else slice_index == last:
            yield "carried", place, None

    def _takes(self, row):
        source = int(self.sources[row])
        if source == NONE:
            return
        if Op(int(self.program.op[source])).is_receive:
            yield "received", int(self.program.slot[source]), None
        else:
            yield "made", source, None

    def _makes(self, row, instruction):
        placement = self.program.placement
        neighbours = placement.next_stage if instruction.op is Op.FORWARD else placement.previous_stage
        if neighbours[instruction.stage] == NONE:
            return
        yield "made", row, "value"
