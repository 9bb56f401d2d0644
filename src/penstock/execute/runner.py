"""The runner: takes one rank through a step, from the agreement on the batch to the exchange of the losses.

Whatever goes wrong on the way ends the step on all ranks, as one error, and leaves nothing of it behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from penstock.errors import PenstockError, StepRefused
from penstock.execute.batch.admission import Admission, Batch, Call, InputNeeds
from penstock.execute.batch.step import Step
from penstock.execute.control.agreement import Extra, Mode, digest
from penstock.execute.control.collectives import Control
from penstock.execute.control.failures import FailureReporter
from penstock.execute.control.handshake import Agreed
from penstock.execute.control.positions import PositionBoard
from penstock.execute.hooks import Hooks
from penstock.execute.interpreter import Interpreter
from penstock.execute.losses.exchange import LossExchange
from penstock.execute.losses.grad_scaler import SharedScaler, grad_scaler_of
from penstock.execute.losses.loss import Loss, LossShares, LossWeights, loss_scale
from penstock.execute.losses.output import takes_weight
from penstock.execute.losses.results import (
    StepResult,
    collect_outputs,
    collector_of,
    merge_slices_and_microbatches,
)
from penstock.execute.observing.clock import ClockComparison
from penstock.execute.observing.device_recorder import recorder_for
from penstock.execute.observing.inspection import Inspection
from penstock.execute.observing.log import log_plan
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.observing.record import Recorder, Recording, gather_recording
from penstock.execute.options import PipelineOptions
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.auxiliary import auxiliary_modules
from penstock.execute.stages.data_parallel import DdpReduction
from penstock.execute.stages.main_gradients import ATTRIBUTE, MainGradients
from penstock.execute.stages.own_parameters import OwnParameters
from penstock.execute.stages.randomness import Randomness
from penstock.execute.stages.recompute import unseeded_draws
from penstock.execute.stages.tied import agree_on_copies
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.protocol import Transport
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


class Runner:
    """Runs the steps of one rank. `program_of` plans what a mode runs; it is asked once for each."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        schedule: Schedule,
        assembly: Assembly,
        options: PipelineOptions,
        agreed: Agreed,
        board: PositionBoard,
        *,
        loss: Loss | None,
        loss_weights: LossWeights,
        program_of: Callable[[Mode], Program],
    ) -> None:
        self._transport = transport
        self._control = Control(transport)
        self._device = device
        self._placement = schedule.placement
        self._assembly = assembly
        self._options = options
        self._loss = loss
        self._loss_weights = loss_weights
        self._tells_weight = loss is not None and takes_weight(loss)
        self._scale = loss_scale(options.scale_loss)
        self._scaler = self._shared_scaler()
        self._exchange = LossExchange(self._control, device)
        self._auxiliary = auxiliary_modules([layer for stage in assembly.stages for layer in stage.layers.values()])
        self._own = OwnParameters(assembly)
        self._trained = 0
        self._program_of = program_of
        self._interpreters: dict[Mode, Interpreter] = {}
        self._active: Program | None = None
        self._failures = FailureReporter(transport, board, self._describe)
        self._inspection = Inspection(transport, device, assembly, options, board.note)
        self._messenger = Messenger(self._inspection.wires, device, has_variable_shapes=options.variable_shapes)
        self._clocks = ClockComparison(transport, device, options.clock, agreed.each("clock_host"))
        self._admission = Admission(
            self._control,
            device,
            options.batch_rule(schedule),
            InputNeeds.of(assembly.stages, schedule.placement, agreed.keywords, has_loss=loss is not None),
            stream_rules=options.stream_rules(),
            checks_values=options.check_batches,
            read=options.clock.read,
        )
        self._main_gradients = self._accumulate_beside() if options.main_gradients else None
        self._ddp = DdpReduction(
            assembly.stages,
            assembly.tied_copies.values(),
            attribute=ATTRIBUTE if options.main_gradients else "grad",
            deadline_s=options.deadline_s,
        )
        self._randomness = None if options.seed is None else Randomness(options.seed, device, options.deadline_s)
        self._num_attempts = 0
        """Steps that have begun, those that failed included; the ranks agree on it with each."""
        self.step_number = 0
        """Training steps that have succeeded; another number is another draw of what layers draw at random."""
        self.recording: Recording | None = None
        """What was measured in the last recorded step, on every rank."""
        log_plan(schedule, transport.rank)

    def run(self, mode: Mode, call: Call, memory: MemoryWatch | None = None) -> StepResult:
        """Run one step; every rank calls it. `memory`, if any, looks at what this rank holds meanwhile.

        Raises:
            StepRefused: on every rank, before anything ran.
            PipelineError: on every rank, if the step fails on any; the next one starts afresh.
        """
        interpreter = self._interpreter(mode)
        self._active = interpreter.program
        with self._failing_together():
            if self._failures.has_failed:
                self._recover()
            self._failures.begin(self._num_attempts)
            problem = self._look_at_parameters() if mode.is_training else None
            draws = self._randomness is not None and mode.is_training
            batch = self._admission.admit(
                mode,
                call,
                problem,
                attempt=self._num_attempts,
                step_number=self.step_number if draws else 0,
                trained=self._own_trained() if mode.is_training else 0,
                scale=self._scaler.scale if self._scaler is not None and mode.is_training else 0.0,
                extra=Extra.MEMORY if memory is not None else Extra.RECORDING if call.record else Extra.NOTHING,
            )
            self._num_attempts = batch.agreed.attempt + 1
            self._inspection.begin(batch.agreed.attempt)
            if mode.is_training:
                self._agree_on_tied(batch.agreed.trained)
            step = self._step(mode, call, batch)
            if self._randomness is not None:
                self._randomness.step = self.step_number
            self._messenger.begin(batch.agreed.signature)
            del batch  # from here on the step alone holds the data
            changes = self._inspection.changes_of_step(interpreter.program)
            if memory is not None:
                changes.append(memory.change(interpreter.program, interpreter.registers))
            with self._inspection.watching(step, is_training=mode.is_training), self._accumulating(mode):
                self._begin_tied(mode)
                recorder = self._begin_recording(interpreter) if call.record else None
                interpreter.run(step, self._failures.board.note, recorder, changes)
            if step.keeps_outputs:
                collect_outputs(self._messenger, step, interpreter.program, self._transport.rank)
            self._failures.board.note(interpreter.num_rows)
            self._messenger.finish()
            result = self._exchange.share(step)
            if step.supply is not None:
                result = replace(result, data_times=step.supply.times)
            if recorder is not None:
                self.recording = self._gather_recording(interpreter, recorder, step)
            self._failures.end()
        self.step_number += mode.is_training
        return self._with_outputs(result, step)

    def close(self) -> None:
        """Leave the others; no step can be run any more."""
        self._failures.close()
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
                optimizer_step=self._optimizer_step,
            )
            rank, stages = self._transport.rank, self._assembly.stages
            changes = self._inspection.changes(program)
            if self._randomness is not None and mode.is_training:
                changes.insert(0, self._randomness.change(program, stages))
            elif mode.is_training:
                changes[:0] = unseeded_draws(program, self._device, self._options.deadline_s)
            self._interpreters[mode] = Interpreter(
                program, rank, stages, self._messenger, hooks, changes=changes, row_of=self._failures.board.row_of
            )
        return self._interpreters[mode]

    def _reduce_stage(self, program: Program) -> Callable[[int], None]:
        """DDP's average, then the caller's hook; for copies of a stage on this rank, one module, after the last."""
        hook = self._options.reduce_stage or _do_nothing_with
        rank = self._transport.rank
        rows = slice(*program.offsets[rank : rank + 2])
        stages = program.stage[rows][program.op[rows] == Op.REDUCE_GRADIENT].tolist()
        layers = {stage.index: tuple(map(id, stage.layers.values())) for stage in self._assembly.stages}
        last_of_copies = {layers[stage]: stage for stage in stages}.values()

        def reduce(stage: int) -> None:
            if stage in last_of_copies:
                self._ddp.reduce(stage)
                hook(stage)

        return reduce

    def _optimizer_step(self) -> None:
        """The end of a training step's program: the scalers of all ranks agree before any optimizer is stepped."""
        if self._scaler is not None:
            self._scaler.share(
                parameter for stage in self._assembly.stages for _, parameter in stage.named_parameters()
            )
        if self._options.optimizer_step is not None:
            self._options.optimizer_step()

    def _shared_scaler(self) -> SharedScaler | None:
        scaler = grad_scaler_of(self._options.scale_loss)
        if scaler is None:
            return None
        attribute = ATTRIBUTE if self._options.main_gradients else "grad"
        return SharedScaler(scaler, self._control, self._device, attribute)

    def _step(self, mode: Mode, call: Call, batch: Batch) -> Step:
        loss = self._loss if mode.is_training or batch.has_target else None
        if loss is not None and mode.is_training and self._randomness is not None:
            loss = self._randomness.around_loss(loss)
        # Only the ranks of last stages weigh losses; the others may have no target to count.
        is_weighing = loss is not None and self._holds_last_stage
        shares = self._loss_weights.shares(batch.microbatches, batch.slices) if is_weighing else LossShares([], [])
        keeps_outputs = collector_of(self._placement) in batch.agreed.wanting_outputs
        return Step(
            batch.slices,
            shares,
            loss,
            keeps_outputs,
            auxiliary_shares=self._loss_weights.shares_of_rows(batch.microbatches, batch.slices),
            tells_weight=self._tells_weight,
            scale=self._scale,
            supply=batch.supply,
        )

    def _with_outputs(self, result: StepResult, step: Step) -> StepResult:
        if not step.outputs:
            return result
        options = self._options
        merged = merge_slices_and_microbatches(step, options.merge, options.merge_slices, options.slice_dim)
        return replace(result, outputs=merged)

    def _own_trained(self) -> int:
        """What stands for which parameters of this rank need gradients, which callers may change between steps."""
        return digest("".join(["01"[parameter.requires_grad] for _, parameter in self._own.named]))

    def _agree_on_tied(self, trained: int) -> None:
        """Compare the copies of tied parameters once more if any rank trains others than in the step before."""
        if trained != self._trained:
            agree_on_copies(self._control, self._assembly.tied_copies)
            self._trained = trained

    def _look_at_parameters(self) -> PenstockError | None:
        """Take in parameters that were replaced; return why they cannot be trained, if they cannot."""
        try:
            if self._own.refresh() and self._main_gradients is not None:
                self._main_gradients = self._accumulate_beside()
            for copy in self._assembly.tied_copies.values():
                copy.refuse_hooks()
        except PenstockError as error:
            return error
        return None

    def _begin_tied(self, mode: Mode) -> None:
        if mode.is_training:
            for copy in self._assembly.tied_copies.values():
                copy.begin_step()

    def _accumulate_beside(self) -> MainGradients:
        for copy in self._assembly.tied_copies.values():
            copy.attribute = ATTRIBUTE
        return MainGradients(self._own.named)

    @contextmanager
    def _accumulating(self, mode: Mode) -> Iterator[None]:
        beside = self._main_gradients if mode.is_training else None
        with self._ddp.step(), nullcontext() if beside is None else beside.accumulating():
            yield

    def _reduce_tied(self, group: int) -> None:
        copy = self._assembly.tied_copies[group]
        for peer in copy.ranks:
            self._messenger.post_waiting(peer)  # the exchange goes behind them, on the same channels
        copy.reduce(self._inspection.wires)

    # ---- failures

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn any error into one that every rank raises, and leave nothing of the step behind."""
        try:
            yield
        except StepRefused:
            self._failures.end()
            raise
        except BaseException as error:
            report = self._failures.report(error)
            self._messenger.reset()
            for interpreter in self._interpreters.values():
                interpreter.clear()
            for copy in self._assembly.tied_copies.values():
                copy.end_step()
            if not isinstance(error, Exception):
                raise  # an interrupt is the caller's to handle; the other ranks have been told
            raise report from error
        finally:
            for module in self._auxiliary:
                module.end()

    def _recover(self) -> None:
        self._failures.recover()
        self._messenger.reset()
        self._admission.check_values_again()

    def _describe(self, rank: int, row: int) -> str:
        if self._active is None:
            return ""
        first, end = self._active.offsets[rank : rank + 2]
        return str(self._active.instruction(int(first) + row)) if row < end - first else ""

    # ---- measuring

    def _begin_recording(self, interpreter: Interpreter) -> Recorder:
        self._clocks.begin()
        options = self._options
        rank, deadline_s = self._transport.rank, options.deadline_s
        return recorder_for(self._device, interpreter.num_rows, options.clock, rank=rank, deadline_s=deadline_s)

    def _gather_recording(self, interpreter: Interpreter, recorder: Recorder, step: Step) -> Recording:
        recorder.finish()
        return gather_recording(
            self._transport,
            interpreter.program,
            recorder,
            self._clocks,
            output_bytes=self._messenger.output_bytes(),
            data_waits=() if step.supply is None else step.supply.waits,
        )


def _do_nothing_with(stage: int) -> None:
    """No reduction was asked for."""
