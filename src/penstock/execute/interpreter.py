"""The interpreter: runs one rank's rows of a program.

The rows are compiled once into bound calls; a step only runs these. A row that computes on a received message becomes
two calls, the wait and the computation, so that a recorded step can tell them apart. The interpreter does not know
which schedule it runs; what an operation does is one entry of `_COMPILE`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MAX_SHOWN, PipelineError
from penstock.execute.arrivals import arrived_before, sends_by_producer, used_at
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.step import Place, Step
from penstock.execute.batch.supply import rows_that_take_data
from penstock.execute.calls import Bound, Call, Change, around_each, changed
from penstock.execute.hooks import Hooks, call_of
from penstock.execute.losses.delivery import deliver_loss
from penstock.execute.observing.record import Recorder
from penstock.execute.registers import Registers
from penstock.execute.stages.auxiliary import StageWithLosses, auxiliary_of
from penstock.execute.stages.carried import RunBackward, RunForward, Save, StageOnSlice, carrying_modules
from penstock.execute.stages.recompute import BufferCopier, checkpoint_of, keep_arguments, on_copied_buffers, unnoted
from penstock.execute.stages.split_backward import backward_input, backward_weight
from penstock.execute.stages.stage import SavedForward, Stage
from penstock.execute.transport.messages import Incoming, Key, Messenger
from penstock.execute.values.tree import detached
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import Op
from penstock.ir.program import Program


class Interpreter:
    """One rank's part of one program, ready to run."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Sequence[Stage],
        messenger: Messenger,
        hooks: Hooks,
        *,
        changes: Sequence[Change] = (),
        row_of: Callable[[int], int] | None = None,
    ) -> None:
        """Compile the program; `changes` are made to the calls of every step, around those of a recorded one.

        `row_of` tells how far another rank is in a step: the number of the row that it is at.
        """
        self.program = program
        self.rank = rank
        self._first_row = int(program.offsets[rank])
        self.num_rows = int(program.offsets[rank + 1]) - self._first_row
        self._stages = {stage.index: stage for stage in stages}
        self._messenger = messenger
        self._hooks = hooks
        self._before = predecessors(program)
        self._rank_of_stage = program.placement.rank_of_stage
        self._feeds = sends_by_producer(program, self._before)
        self._arrived = arrived_before(program, self._before, rank)
        self._used = used_at(program, self._before, rank)
        self._row_of = row_of
        self._is_training = not program.is_forward_only
        self._step: Step | None = None
        self._rows = range(self._first_row, self._first_row + self.num_rows)
        self._registers = Registers.for_rows(program, self._rows)
        self._carrying = {stage.index: carrying_modules(stage) for stage in stages if program.num_slices > 1}
        self._auxiliary = auxiliary_of(stages)
        self._split_stages = frozenset(program.stage[program.op == Op.BACKWARD_INPUT].tolist())
        self._takes_data = rows_that_take_data(program, self._rows, self._stages)
        self._run_again = frozenset(self._before[program.op == Op.RECOMPUTE, 0].tolist())
        self._copiers = {stage.index: BufferCopier(stage) for stage in stages}
        self._changes = changes
        self._compiled = [bound for row in self._rows for bound in self._compile(row)]
        self._bound = changed(self._compiled, changes)

    def _compile(self, row: int) -> Iterator[Bound]:
        return _COMPILE.get(Op(int(self.program.op[row])), Interpreter._compile_other)(self, row)

    def run(
        self,
        step: Step,
        note: Callable[[int], None],
        recorder: Recorder | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        """Run all rows; `note` is told each row's number, from 0, before it runs.

        They are measured where there is a recorder; `changes` are made to the calls of this step alone.

        Raises:
            PipelineError: if anything stays alive behind the step.
        """
        bounds = self._bound
        if recorder is not None:
            changes = (around_each(lambda bound: self._recorded(recorder, bound)), *changes)
        if changes:
            bounds = changed(self._compiled, (*changes, *self._changes))
        if step.supply is not None:
            bounds = step.supply.woven_into(bounds, self._takes_data)
        calls = [(bound.row - self._first_row, bound.call) for bound in bounds]
        self._step = step
        if self._is_training:
            for stage in self._stages.values():
                stage.is_split = stage.index in self._split_stages
        with torch.set_grad_enabled(self._is_training):
            for row, call in calls:
                note(row)
                call()
        self._step = None
        if self._registers.leftovers():
            names = islice(self._registers.name_leftovers(self.program, self._rows), MAX_SHOWN)
            raise PipelineError(
                f"rank {self.rank}: {self._registers.leftovers()} values stay alive behind the step: "
                f"{', '.join(names)}; the program does not free what it makes. Check it with penstock.check",
                rank=self.rank,
            )

    @property
    def registers(self) -> Registers:
        """Where the values of this rank live."""
        return self._registers

    def clear(self) -> None:
        """Drop what a failed step left behind."""
        self._registers.clear()
        self._step = None

    def _recorded(self, recorder: Recorder, bound: Bound) -> Call:
        if bound.receive_row is not None:
            return recorder.timed_arrival(bound.receive_row - self._first_row, bound.call)
        return recorder.timed(bound.row - self._first_row, bound.call)

    # ---- forward

    def _compile_forward(self, row: int) -> Iterator[Bound]:
        place = self._place(row)
        slot = int(self.program.slot[row])
        take_inputs, waits = self._inputs(row, self._messenger.take_tree)
        deliver, saved = self._deliver_outputs(row), self._registers.saved
        run, save = self._forward_of(row)
        if row in self._run_again:
            run, save = keep_arguments(self._copiers[int(self.program.stage[row])], run, save)
        # The batch itself belongs to the caller: its gradients, if any, are the caller's too.
        keeps_inputs = int(self._before[row, 0]) != NONE

        def forward_training() -> None:
            inputs, keywords = take_inputs(), self._slice(place).kwargs
            saved[slot] = save(inputs if keeps_inputs else (), deliver(run(inputs, keywords)))

        def forward_only() -> None:
            deliver(run(take_inputs(), self._slice(place).kwargs))

        yield from waits
        yield Bound(row, forward_training if self._is_training else forward_only)

    def _compile_recompute(self, row: int) -> Iterator[Bound]:
        forward, stage = int(self._before[row, 0]), self._stages[int(self.program.stage[row])]
        slot, action = int(self.program.slot[row]), str(self.program.instruction(forward))
        deliver = self._deliver_loss(self._place(row)) if self._is_last(row) else lambda outputs: outputs
        saved = self._registers.saved
        run, save = self._forward_of(row)
        keeps_inputs = int(self._before[forward, 0]) != NONE

        def run_again() -> None:
            checkpoint, step = checkpoint_of(saved[slot], action), self._running_step()
            self._step = unnoted(step)
            with on_copied_buffers(stage, checkpoint):
                outputs = run(checkpoint.arguments, checkpoint.keywords)
                saved[slot] = save(checkpoint.arguments if keeps_inputs else (), deliver(outputs))
            self._step = step

        yield Bound(row, run_again)

    def _forward_of(self, row: int) -> tuple[RunForward, Save]:
        """How the stage of a row runs forward, or again, and what keeps what its backward needs."""
        stage, place = self._stages[int(self.program.stage[row])], self._place(row)
        run: RunForward = stage.forward
        save: Save = stage.save_loss if self._is_last(row) else stage.save
        if (on_slice := self._on_slice(stage, place)) is not None:
            is_first = self.program.op[row] == Op.FORWARD
            run, save = on_slice.forward if is_first else on_slice.again, on_slice.saving(save)
        if modules := self._auxiliary[stage.index]:
            losses = StageWithLosses(stage, modules, place, self._running_step)
            run, save = losses.running(run), losses.saving(save)
        return run, save

    def _inputs(
        self, row: int, take: Callable[[Incoming], Any]
    ) -> tuple[Callable[[], tuple[Any, ...]], Sequence[Bound]]:
        """How a row gets its inputs, and the waits that come before it."""
        source = int(self._before[row, 0])
        if source == NONE:
            place = self._place(row)
            return lambda: self._slice(place).args, ()
        if not Op(int(self.program.op[source])).is_receive:
            return self._handed_on(source), ()
        registers, slot = self._registers, int(self.program.slot[source])
        release, (peer, num_arrived) = self._messenger.release, self._arrived[source]

        def wait() -> None:
            incoming = registers.received[slot]
            assert incoming is not None
            registers.inputs[slot] = take(incoming)
            registers.received[slot] = None
            release(peer, num_arrived)

        def take_received() -> tuple[Any, ...]:
            value, registers.inputs[slot] = registers.inputs[slot], None
            return (value,)

        return take_received, (Bound(row, wait, source),)

    def _handed_on(self, source: int) -> Callable[[], tuple[Any, ...]]:
        """How a row gets what another one of this rank has left for it."""
        handed_on, action = self._registers.handed_on, str(self.program.instruction(source))
        if self.program.op[source] == Op.FORWARD:
            return lambda: (handed_on.pop(source).checked(action),)
        return lambda: (handed_on.pop(source),)

    def _deliver_outputs(self, row: int) -> Callable[[Any], Any]:
        """Where a forward's outputs go; the call returns what the backward starts from."""
        if self._is_last(row):
            return self._deliver_loss(self._place(row))
        key, action = self._key(row), str(self.program.instruction(row))
        note_outputs = self._messenger.note_outputs
        leave = self._leave(row)

        def deliver(outputs: Any) -> Any:
            note_outputs(key, outputs, action)
            leave(VersionGuard.detached(outputs))
            return outputs

        return deliver

    def _leave(self, row: int) -> Callable[[Any], None]:
        """A call that leaves what a row makes for its send, or for another stage of this rank."""
        send = int(self._feeds[row])
        is_sent = send != NONE
        column: list[Any] | dict[int, Any] = self._registers.outgoing if is_sent else self._registers.handed_on
        place = int(self.program.slot[send]) if is_sent else row

        def leave(value: Any) -> None:
            column[place] = value

        return leave

    def _deliver_loss(self, place: Place) -> Callable[[Any], Any]:
        def deliver(outputs: Any) -> Any:
            step = self._running_step()
            if step.keeps_outputs:
                step.outputs[place] = detached(outputs)
            return deliver_loss(step, place, outputs, self._slice(place).target, is_training=self._is_training)

        return deliver

    # ---- backward

    def _compile_backward(self, row: int) -> Iterator[Bound]:
        stage = self._stages[int(self.program.stage[row])]
        slot = int(self.program.slot[row])
        saved = self._registers.saved
        is_whole = bool(self.program.op[row] == Op.BACKWARD)
        run: RunBackward = Stage.backward if is_whole else backward_input
        if (on_slice := self._on_slice(stage, self._place(row))) is not None:
            run = on_slice.backing(run)
        leave = self._leave_gradients(row)
        take_gradients, waits = self._gradients(row)

        def backward() -> None:
            kept = saved[slot]
            assert kept is not None
            leave(run(stage, kept, take_gradients(kept)))
            if is_whole:
                saved[slot] = None

        yield from waits
        yield Bound(row, backward)

    def _gradients(self, row: int) -> tuple[Callable[[SavedForward], Sequence[Tensor]], Sequence[Bound]]:
        """How a backward gets the gradients of its stage's outputs."""
        if self._before[row, 0] == NONE:
            return lambda kept: kept.loss_gradients, ()
        take, waits = self._inputs(row, self._messenger.take_gradients)
        if self._auxiliary[int(self.program.stage[row])]:
            return lambda kept: [*take()[0], *kept.loss_gradients], waits
        return lambda kept: take()[0], waits

    def _leave_gradients(self, row: int) -> Callable[[list[Tensor]], None]:
        if self.program.placement.previous_stage[self.program.stage[row]] == NONE:
            return lambda gradients: None
        return self._leave(row)

    def _compile_backward_weight(self, row: int) -> Iterator[Bound]:
        stage = self._stages[int(self.program.stage[row])]
        slot = int(self.program.slot[row])
        saved = self._registers.saved

        def run_weight() -> None:
            kept = saved[slot]
            assert kept is not None
            backward_weight(stage, kept)
            saved[slot] = None

        yield Bound(row, run_weight)

    # ---- messages

    def _compile_send(self, row: int) -> Iterator[Bound]:
        peer, key, slot = self._peer(row), self._key(row), int(self.program.slot[row])
        outgoing, let_go = self._registers.outgoing, self._letting_go(peer)
        action = str(self.program.instruction(int(self._before[row, 0])))
        is_forward = self.program.op[row] == Op.SEND_FORWARD
        send_forward, send_backward = self._messenger.send_forward, self._messenger.send_backward

        def send_message() -> None:
            values, outgoing[slot] = outgoing[slot], None
            if is_forward:
                send_forward(peer, key, values.checked(action))
            else:
                send_backward(peer, values, key)
            let_go()

        yield Bound(row, send_message)

    def _letting_go(self, peer: int) -> Call:
        """A call that lets go of what was sent to a peer and is seen to have been used there."""
        row_of, used, release = self._row_of, self._used[peer], self._messenger.release
        if row_of is None:
            return lambda: None
        return lambda: release(peer, bisect_left(used, row_of(peer)))

    def _compile_receive(self, row: int) -> Iterator[Bound]:
        is_forward = self.program.op[row] == Op.RECEIVE_FORWARD
        post = self._messenger.post_forward if is_forward else self._messenger.post_backward
        # A gradient belongs to the outputs of this stage, an input to this stage: the key is this stage's both times.
        peer, key, slot = self._peer(row), self._key(row), int(self.program.slot[row])
        received = self._registers.received

        def post_receive() -> None:
            received[slot] = post(peer, key)

        yield Bound(row, post_receive)

    # ---- the rest

    def _compile_other(self, row: int) -> Iterator[Bound]:
        yield Bound(row, call_of(self.program.instruction(row), self._hooks))

    def _is_last(self, row: int) -> bool:
        return bool(self.program.placement.next_stage[self.program.stage[row]] == NONE)

    def _slice(self, place: Place) -> Microbatch:
        microbatch, index = place
        return self._running_step().slices[microbatch][index]

    def _running_step(self) -> Step:
        assert self._step is not None
        return self._step

    def _on_slice(self, stage: Stage, place: Place) -> StageOnSlice | None:
        """The stage at work on a slice; None where its layers carry nothing from one to the next."""
        modules = self._carrying.get(stage.index)
        is_last = place[1] == self.program.num_slices - 1
        return StageOnSlice(stage, modules, self._registers.trails, place, is_last) if modules else None

    def _place(self, row: int) -> Place:
        return int(self.program.microbatch[row]), int(self.program.slice[row])

    def _peer(self, row: int) -> int:
        return self._rank_of_stage[int(self.program.peer[row])]

    def _key(self, row: int) -> Key:
        program = self.program
        return int(program.stage[row]), int(program.microbatch[row]), int(program.slice[row])


_COMPILE: dict[Op, Callable[[Interpreter, int], Iterator[Bound]]] = {
    Op.FORWARD: Interpreter._compile_forward,
    Op.BACKWARD: Interpreter._compile_backward,
    Op.BACKWARD_INPUT: Interpreter._compile_backward,
    Op.BACKWARD_WEIGHT: Interpreter._compile_backward_weight,
    Op.RECOMPUTE: Interpreter._compile_recompute,
    Op.SEND_FORWARD: Interpreter._compile_send,
    Op.SEND_BACKWARD: Interpreter._compile_send,
    Op.RECEIVE_FORWARD: Interpreter._compile_receive,
    Op.RECEIVE_BACKWARD: Interpreter._compile_receive,
}
