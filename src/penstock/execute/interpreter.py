"""The interpreter: runs one rank's rows of a program.

The rows are compiled once into bound calls; a step only runs these. A row that computes on a received message becomes
two calls, the wait and the computation, so that a recorded step can tell them apart. The interpreter does not know
which schedule it runs; what an operation does is one entry of `_COMPILE`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MAX_SHOWN, PipelineError
from penstock.execute.arrivals import arrived_before
from penstock.execute.carried import RunBackward, RunForward, Save, StageOnSlice, carrying_modules
from penstock.execute.loss import scalar_loss
from penstock.execute.messages import Incoming, Key, Messenger
from penstock.execute.microbatch import Microbatch
from penstock.execute.record import Call, Recorder
from penstock.execute.registers import Registers
from penstock.execute.split_backward import backward_input, backward_weight
from penstock.execute.stage import SavedForward, Stage
from penstock.execute.step import Place, Step
from penstock.execute.tree import flatten, map_leaves
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.program import Program


@dataclass(slots=True, eq=False)
class Hooks:
    """What instructions other than computations and messages call."""

    reduce_stage: Callable[[int], None]
    """Stage index; its gradients are whole."""
    reduce_tied: Callable[[int], None]
    """Index of the tied group."""
    optimizer_step: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Bound:
    """One call of a row; `receive_row` is set where it waits for a message, and is that message's receive."""

    row: int
    call: Call
    receive_row: int | None = None


class Interpreter:
    """One rank's part of one program, ready to run."""

    def __init__(
        self, program: Program, rank: int, stages: Sequence[Stage], messenger: Messenger, hooks: Hooks
    ) -> None:
        self.program = program
        self.rank = rank
        self._first_row = int(program.offsets[rank])
        self.num_rows = int(program.offsets[rank + 1]) - self._first_row
        self._stages = {stage.index: stage for stage in stages}
        self._messenger = messenger
        self._hooks = hooks
        self._before = predecessors(program)
        self._rank_of_stage = program.placement.rank_of_stage
        self._feeds = _sends_by_producer(program, self._before)
        self._arrived = arrived_before(program, self._before, rank)
        self._is_training = not program.is_forward_only
        self._step: Step | None = None
        self._rows = range(self._first_row, self._first_row + self.num_rows)
        self._registers = Registers.for_rows(program, self._rows)
        self._carrying = {stage.index: carrying_modules(stage) for stage in stages if program.num_slices > 1}
        is_split = program.op == Op.BACKWARD_INPUT
        self._split_stages = frozenset(program.stage[is_split].tolist())
        self._bound = [bound for row in self._rows for bound in _COMPILE[Op(int(program.op[row]))](self, row)]

    def run(self, step: Step, note: Callable[[int], None], recorder: Recorder | None = None) -> None:
        """Run all rows, measured where there is a recorder; `note` is told each row's number, from 0, before it runs.

        Raises:
            PipelineError: if anything stays alive behind the step.
        """
        calls = [(bound.row - self._first_row, bound.call) for bound in self._bound]
        if recorder is not None:
            calls = [(bound.row - self._first_row, self._recorded(recorder, bound)) for bound in self._bound]
        self._step = step
        for stage in self._stages.values() if self._is_training else ():
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

    def clear(self) -> None:
        """Drop what a failed step left behind."""
        self._registers.clear()
        self._step = None

    def _recorded(self, recorder: Recorder, bound: _Bound) -> Call:
        if bound.receive_row is not None:
            return recorder.timed_arrival(bound.receive_row - self._first_row, bound.call)
        return recorder.timed(bound.row - self._first_row, bound.call)

    # ---- forward

    def _compile_forward(self, row: int) -> Iterator[_Bound]:
        stage = self._stages[int(self.program.stage[row])]
        place = self._place(row)
        slot = int(self.program.slot[row])
        take_inputs, waits = self._inputs(row, self._messenger.take_tree)
        deliver = self._deliver_outputs(row)
        saved = self._registers.saved
        run: RunForward = stage.forward
        save: Save = stage.save_loss if self._is_last(row) else stage.save
        if (on_slice := self._on_slice(stage, place)) is not None:
            run, save = on_slice.forward, on_slice.saving(save)
        # The batch itself belongs to the caller: its gradients, if any, are the caller's too.
        keeps_inputs = int(self._before[row, 0]) != NONE

        def forward_training() -> None:
            inputs, keywords = take_inputs(), self._slice(place).kwargs
            saved[slot] = save(inputs if keeps_inputs else (), deliver(run(inputs, keywords)))

        def forward_only() -> None:
            deliver(run(take_inputs(), self._slice(place).kwargs))

        yield from waits
        yield _Bound(row, forward_training if self._is_training else forward_only)

    def _inputs(
        self, row: int, take: Callable[[Incoming], Any]
    ) -> tuple[Callable[[], tuple[Any, ...]], Sequence[_Bound]]:
        """How a row gets its inputs, and the waits that come before it."""
        source = int(self._before[row, 0])
        if source == NONE:
            place = self._place(row)
            return lambda: self._slice(place).args, ()
        if not Op(int(self.program.op[source])).is_receive:
            handed_on = self._registers.handed_on
            return lambda: (handed_on.pop(source),), ()
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

        return take_received, (_Bound(row, wait, source),)

    def _deliver_outputs(self, row: int) -> Callable[[Any], Any]:
        """Where a forward's outputs go; the call returns what the backward starts from."""
        if self._is_last(row):
            return self._deliver_loss(self._place(row))
        key, action = self._key(row), str(self.program.instruction(row))
        note_outputs = self._messenger.note_outputs
        put = self._put(row)

        def deliver(outputs: Any) -> Any:
            note_outputs(key, outputs, action)
            put(outputs)
            return outputs

        return deliver

    def _put(self, row: int) -> Callable[[Any], None]:
        """Leave a forward's outputs for their send, or for a stage of this rank."""
        send = int(self._feeds[row])
        if send != NONE:
            outgoing, slot = self._registers.outgoing, int(self.program.slot[send])
            return lambda outputs: outgoing.__setitem__(slot, map_leaves(_detached, outputs))
        handed_on = self._registers.handed_on
        return lambda outputs: handed_on.__setitem__(row, map_leaves(_detached, outputs))

    def _deliver_loss(self, place: Place) -> Callable[[Any], Any]:
        microbatch = place[0]

        def deliver(outputs: Any) -> Any:
            step = self._step
            assert step is not None
            if step.keeps_outputs:
                step.outputs[place] = map_leaves(_without_gradient, outputs)
            if step.loss is None:
                return None
            loss = scalar_loss(step.loss(outputs, self._slice(place).target), microbatch)
            step.losses[place] = loss.detach()
            weight = step.shares.factor(*place)
            if self._is_training and weight and not loss.requires_grad and _needs_gradient(outputs):
                raise PipelineError(
                    f"microbatch {microbatch}: the loss does not depend on the output any more, so nothing would be "
                    "trained; compute it from the output without detach(), item() or no_grad()"
                )
            # Weight 0 means no tokens: such a loss may be NaN, and 0 x NaN would reach every weight.
            return loss * weight if weight else None

        return deliver

    # ---- backward

    def _compile_backward(self, row: int) -> Iterator[_Bound]:
        stage = self._stages[int(self.program.stage[row])]
        slot = int(self.program.slot[row])
        saved = self._registers.saved
        is_whole = bool(self.program.op[row] == Op.BACKWARD)
        run: RunBackward = Stage.backward if is_whole else backward_input
        if (on_slice := self._on_slice(stage, self._place(row))) is not None:
            run = on_slice.backing(run)
        put = self._put_gradients(row)
        take_gradients, waits = self._gradients(row)

        def backward() -> None:
            kept = saved[slot]
            assert kept is not None
            put(run(stage, kept, take_gradients(kept)))
            if is_whole:
                saved[slot] = None

        yield from waits
        yield _Bound(row, backward)

    def _gradients(self, row: int) -> tuple[Callable[[SavedForward], Sequence[Tensor]], Sequence[_Bound]]:
        """How a backward gets the gradients of its stage's outputs."""
        if self._before[row, 0] == NONE:
            return lambda kept: kept.loss_gradients, ()
        take, waits = self._inputs(row, self._messenger.take_gradients)
        return lambda kept: take()[0], waits

    def _put_gradients(self, row: int) -> Callable[[list[Tensor]], None]:
        if self.program.placement.previous_stage[self.program.stage[row]] == NONE:
            return lambda gradients: None
        send = int(self._feeds[row])
        if send != NONE:
            outgoing, slot = self._registers.outgoing, int(self.program.slot[send])
            return lambda gradients: outgoing.__setitem__(slot, gradients)
        handed_on = self._registers.handed_on
        return lambda gradients: handed_on.__setitem__(row, gradients)

    def _compile_backward_weight(self, row: int) -> Iterator[_Bound]:
        stage = self._stages[int(self.program.stage[row])]
        slot = int(self.program.slot[row])
        saved = self._registers.saved

        def run_weight() -> None:
            kept = saved[slot]
            assert kept is not None
            backward_weight(stage, kept)
            saved[slot] = None

        yield _Bound(row, run_weight)

    # ---- messages

    def _compile_send(self, row: int) -> Iterator[_Bound]:
        peer, key, slot = self._peer(row), self._key(row), int(self.program.slot[row])
        outgoing = self._registers.outgoing
        send = self._messenger.send_backward
        if self.program.op[row] == Op.SEND_FORWARD:
            yield _Bound(row, self._forward_sender(peer, key, slot))
            return

        def send_backward() -> None:
            gradients, outgoing[slot] = outgoing[slot], None
            send(peer, gradients)

        yield _Bound(row, send_backward)

    def _forward_sender(self, peer: int, key: Key, slot: int) -> Call:
        outgoing, send = self._registers.outgoing, self._messenger.send_forward

        def send_forward() -> None:
            outputs, outgoing[slot] = outgoing[slot], None
            send(peer, key, outputs)

        return send_forward

    def _compile_receive(self, row: int) -> Iterator[_Bound]:
        is_forward = self.program.op[row] == Op.RECEIVE_FORWARD
        post = self._messenger.post_forward if is_forward else self._messenger.post_backward
        # A gradient belongs to the outputs of this stage, an input to this stage: the key is this stage's both times.
        peer, key, slot = self._peer(row), self._key(row), int(self.program.slot[row])
        received = self._registers.received
        yield _Bound(row, lambda: received.__setitem__(slot, post(peer, key)))

    # ---- the rest

    def _compile_reduce(self, row: int) -> Iterator[_Bound]:
        stage, reduce_stage = int(self.program.stage[row]), self._hooks.reduce_stage
        yield _Bound(row, lambda: reduce_stage(stage))

    def _compile_reduce_tied(self, row: int) -> Iterator[_Bound]:
        group, reduce_tied = int(self.program.peer[row]), self._hooks.reduce_tied
        yield _Bound(row, lambda: reduce_tied(group))

    def _compile_optimizer_step(self, row: int) -> Iterator[_Bound]:
        yield _Bound(row, self._hooks.optimizer_step)

    def _compile_sharding(self, row: int) -> Iterator[_Bound]:
        """Parameters are not sharded, so they are always whole."""
        yield _Bound(row, lambda: None)

    def _is_last(self, row: int) -> bool:
        return bool(self.program.placement.next_stage[self.program.stage[row]] == NONE)

    def _slice(self, place: Place) -> Microbatch:
        assert self._step is not None
        microbatch, index = place
        return self._step.slices[microbatch][index]

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


_COMPILE: dict[Op, Callable[[Interpreter, int], Iterator[_Bound]]] = {
    Op.FORWARD: Interpreter._compile_forward,
    Op.BACKWARD: Interpreter._compile_backward,
    Op.BACKWARD_INPUT: Interpreter._compile_backward,
    Op.BACKWARD_WEIGHT: Interpreter._compile_backward_weight,
    Op.SEND_FORWARD: Interpreter._compile_send,
    Op.SEND_BACKWARD: Interpreter._compile_send,
    Op.RECEIVE_FORWARD: Interpreter._compile_receive,
    Op.RECEIVE_BACKWARD: Interpreter._compile_receive,
    Op.UNSHARD: Interpreter._compile_sharding,
    Op.RESHARD: Interpreter._compile_sharding,
    Op.REDUCE_GRADIENT: Interpreter._compile_reduce,
    Op.REDUCE_TIED: Interpreter._compile_reduce_tied,
    Op.OPTIMIZER_STEP: Interpreter._compile_optimizer_step,
}


def _sends_by_producer(program: Program, before: Any) -> list[int]:
    """Per row, the send that carries its result away, or NONE."""
    feeds = [NONE] * program.num_instructions
    for row, op in enumerate(program.op):
        if Op(int(op)).is_send:
            feeds[int(before[row, 0])] = row
    return feeds


def _detached(leaf: Any) -> Any:
    """The same values as a leaf of their own, asking for a gradient where the original has one."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _needs_gradient(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(tree)[0])


def _without_gradient(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
