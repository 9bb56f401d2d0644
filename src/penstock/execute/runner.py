"""The runner: takes one rank through a step, from the agreement on the batch to the exchange of the losses.

Whatever goes wrong on the way ends the step on all ranks, as one error, and leaves nothing of it behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from penstock.errors import StepRefused
from penstock.execute.agreement import Mode
from penstock.execute.assemble import Assembly
from penstock.execute.clock import ClockComparison
from penstock.execute.failure import FailureDesk
from penstock.execute.gate import Batch, Call, Gate, wants_of
from penstock.execute.interpreter import Hooks, Interpreter
from penstock.execute.loss import Loss, LossShares, LossWeights
from penstock.execute.messages import Messenger
from penstock.execute.options import PipelineOptions
from penstock.execute.record import Recorder, Recording, gather_recording
from penstock.execute.results import (
    StepResult,
    collect_outputs,
    collector_of,
    merge_slices_and_microbatches,
    share_losses,
)
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


class Runner:
    """Runs the steps of one rank. `program_of` plans what a mode runs; it is asked once for each.

    Made on all ranks together.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        schedule: Schedule,
        assembly: Assembly,
        options: PipelineOptions,
        *,
        loss: Loss | None,
        loss_weights: LossWeights,
        program_of: Callable[[Mode], Program],
    ) -> None:
        self._transport = transport
        self._device = device
        self._placement = schedule.placement
        self._assembly = assembly
        self._options = options
        self._loss = loss
        self._loss_weights = loss_weights
        self._program_of = program_of
        self._interpreters: dict[Mode, Interpreter] = {}
        self._active: Program | None = None
        self._desk = FailureDesk(transport, self._describe)
        self._messenger = Messenger(transport, device, has_variable_shapes=options.variable_shapes)
        self._clocks = ClockComparison(transport, device, options.clock)
        has_loss = self._holds_last_stage and loss is not None
        wants = wants_of(assembly.stages, schedule.placement, transport, has_loss=has_loss)
        self._gate = Gate(transport, device, options.batch_rule(schedule), wants)
        self.recording: Recording | None = None
        """What was measured in the last recorded step, on every rank."""

    def run(self, mode: Mode, call: Call) -> StepResult:
        """Run one step; every rank calls it.

        Raises:
            StepRefused: on every rank, before anything ran.
            PipelineError: on every rank, if the step fails on any; the next one starts afresh.
        """
        interpreter = self._interpreter(mode)
        self._active = interpreter.program
        with self._failing_together():
            if self._desk.has_failed:
                self._recover()
            self._desk.begin()
            batch = self._gate.admit(mode, call)
            step = self._step(mode, call, batch)
            self._messenger.begin(batch.signature)
            self._begin_tied(mode)
            recorder = self._begin_recording(interpreter) if call.record else None
            interpreter.run(step, self._desk.board.note, recorder)
            if step.keeps_outputs:
                collect_outputs(self._messenger, step, interpreter.program, self._transport.rank)
            self._desk.board.note(interpreter.num_rows)
            self._messenger.finish()
            result = share_losses(self._transport, step, self._device)
            if recorder is not None:
                self.recording = self._gather_recording(interpreter, recorder)
            self._desk.end()
        return self._with_outputs(result, step)

    def close(self) -> None:
        """Leave the others; no step can be run any more."""
        self._desk.close()
        self._transport.close()

    @property
    def _holds_last_stage(self) -> bool:
        return any(self._placement.next_stage[stage.index] < 0 for stage in self._assembly.stages)

    # ---- what runs

    def _interpreter(self, mode: Mode) -> Interpreter:
        if mode not in self._interpreters:
            program = self._program_of(mode)
            hooks = Hooks(
                reduce_stage=self._reduce_stage(program),
                reduce_tied=self._reduce_tied,
                optimizer_step=self._options.optimizer_step or _do_nothing,
            )
            rank, stages = self._transport.rank, self._assembly.stages
            self._interpreters[mode] = Interpreter(program, rank, stages, self._messenger, hooks)
        return self._interpreters[mode]

    def _reduce_stage(self, program: Program) -> Callable[[int], None]:
        """The caller's hook; copies of a stage on this rank are one module, so it is called for the last of them."""
        hook = self._options.reduce_stage or _do_nothing_with
        rank = self._transport.rank
        rows = slice(*program.offsets[rank : rank + 2])
        stages = program.stage[rows][program.op[rows] == Op.REDUCE_GRADIENT].tolist()
        layers = {stage.index: tuple(map(id, stage.layers.values())) for stage in self._assembly.stages}
        last_of_copies = {layers[stage]: stage for stage in stages}.values()
        return lambda stage: hook(stage) if stage in last_of_copies else None

    def _step(self, mode: Mode, call: Call, batch: Batch) -> Step:
        loss = self._loss if mode.is_training or call.target is not None else None
        # Only the ranks of last stages weigh losses; the others may have no target to count.
        is_weighing = loss is not None and self._holds_last_stage
        shares = self._loss_weights.shares(batch.microbatches, batch.slices) if is_weighing else LossShares([], [])
        keeps_outputs = collector_of(self._placement) in batch.wanting_outputs
        return Step(batch.slices, shares, loss, keeps_outputs)

    def _with_outputs(self, result: StepResult, step: Step) -> StepResult:
        if not step.outputs:
            return result
        options = self._options
        merged = merge_slices_and_microbatches(step, options.merge, options.merge_slices, options.slice_dim)
        return replace(result, outputs=merged)

    def _begin_tied(self, mode: Mode) -> None:
        if mode.is_training:
            for copy in self._assembly.tied_copies.values():
                copy.begin_step()

    def _reduce_tied(self, group: int) -> None:
        self._assembly.tied_copies[group].reduce(self._transport)

    # ---- failures

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn any error into one that every rank raises, and leave nothing of the step behind."""
        try:
            yield
        except StepRefused:
            self._desk.end()
            raise
        except Exception as error:
            report = self._desk.report(error)
            self._messenger.reset()
            for interpreter in self._interpreters.values():
                interpreter.clear()
            for copy in self._assembly.tied_copies.values():
                copy.end_step()
            raise report from error

    def _recover(self) -> None:
        self._desk.recover()
        self._messenger.reset()

    def _describe(self, rank: int, row: int) -> str:
        if self._active is None:
            return ""
        first, end = self._active.offsets[rank : rank + 2]
        return str(self._active.instruction(int(first) + row)) if row < end - first else ""

    # ---- measuring

    def _begin_recording(self, interpreter: Interpreter) -> Recorder:
        self._clocks.begin()
        return Recorder(interpreter.num_rows, self._options.clock)

    def _gather_recording(self, interpreter: Interpreter, recorder: Recorder) -> Recording:
        sizes = self._messenger.output_bytes()
        return gather_recording(self._transport, interpreter.program, recorder, self._clocks, output_bytes=sizes)


def _do_nothing() -> None:
    """No optimizer step was asked for."""


def _do_nothing_with(stage: int) -> None:
    """No reduction was asked for."""
