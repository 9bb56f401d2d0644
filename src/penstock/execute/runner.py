"""The runner: takes one rank through a step, from the agreement on the batch to the exchange of the losses.

Whatever goes wrong on the way ends the step on all ranks, as one error, and leaves nothing of it behind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import PipelineError, StepRefused
from penstock.execute.batch.admission import Admission, Batch, Call
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.compile.features import compose_stages
from penstock.execute.compile.program import CompiledProgram, compile_program
from penstock.execute.compile.programs import CompiledPrograms
from penstock.execute.control.agreement import Extra, Mode
from penstock.execute.control.collectives import Control
from penstock.execute.control.compilations import COMPILE_DEADLINE_S, Compilations
from penstock.execute.control.error_notes import note_place
from penstock.execute.control.failures import FailureReporter
from penstock.execute.control.handshake import Agreed
from penstock.execute.control.positions import PositionBoard
from penstock.execute.losses.exchange import LossExchange
from penstock.execute.losses.loss import Loss, LossWeights, loss_scale
from penstock.execute.losses.results import StepResult
from penstock.execute.losses.step_losses import LossMaker
from penstock.execute.lost_device import keeping_what_is_lost
from penstock.execute.observing.checked_values import ValueChecks
from penstock.execute.observing.clock import ClockComparison
from penstock.execute.observing.log import log_plan, message_log
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.observing.observer import Observer, observing
from penstock.execute.observing.recorder import Recording, StepRecording, recorder_for
from penstock.execute.observing.selection import observers_for, transport_of_messages
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.rows import RankRows
from penstock.execute.options import PipelineOptions
from penstock.execute.outputs import collect_outputs, merge_slices_and_microbatches, output_rank
from penstock.execute.overlap import overlapping
from penstock.execute.parameters.sharded import Sharded
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.run import run_step
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.auxiliary import Auxiliary
from penstock.execute.stages.evaluation import evaluating
from penstock.execute.stages.feature import modules_with
from penstock.execute.stages.randomness import Randomness, default_generators
from penstock.execute.step import Change, Step
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.places import Places
from penstock.execute.values.tree import flatten
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


class Runner:
    """Runs the steps of one rank. `program_of` plans what a mode runs on so many microbatches, where
    a replica has at most so many; it is asked once for each.
    """

    def __init__(
        self,
        places: Places,
        device: torch.device,
        schedule: Schedule,
        assembly: Assembly,
        options: PipelineOptions,
        agreed: Agreed,
        board: PositionBoard,
        *,
        loss: Loss | None,
        loss_weights: LossWeights,
        program_of: Callable[[Mode, int, int], Program],
    ) -> None:
        self._places, self._device = places, device
        self._transport = transport = places.pipeline
        self._placement, self._num_microbatches = schedule.placement, schedule.num_microbatches
        self._assembly, self._options = assembly, options
        is_last = any(self._placement.next_stage[stage.index] < 0 for stage in assembly.stages)
        self._losses = LossMaker(loss, loss_weights, loss_scale(options.scale_loss), is_last=is_last)
        own_layers = [layer for stage in assembly.stages for layer in stage.modules]
        control = Control.of(places)
        self.parameters = RankParameters(control, device, assembly, options)
        self._is_synced = self._sums_tied = True  # as the fields of `Step` say
        self._exchange = LossExchange(control, device)
        self._auxiliary: list[Auxiliary] = modules_with(own_layers, Auxiliary)
        self._programs = CompiledPrograms(places, program_of, self._compile)
        self._failures = FailureReporter(places, board, self._programs.describe)
        self._compilations = Compilations(places, board, own_layers)
        self._observers = observers_for(
            control,
            device,
            assembly,
            debug=options.debug,
            ranges=options.ranges,
            run_ahead=options.run_ahead,
            own=options.observers,
            gradient_attribute=options.gradient_attribute,
        )
        self._message_transport = transport_of_messages(self._observers, transport)
        self._messenger = Messenger(self._message_transport, device, has_variable_shapes=options.variable_shapes)
        self._num_attempts = 0  # steps that have begun, also those that failed; the ranks agree on it with each
        self._clocks = ClockComparison(transport, device, options.clock, agreed.each("clock_host"))
        self._admission = Admission(
            control,
            options.batch_rule(schedule),
            InputNeeds.of(
                assembly.keyword_names(), schedule.placement, agreed.keywords, device, has_loss=loss is not None
            ),
            stream_rules=options.stream_rules(),
            checks_values=options.check_batches,
            weigh=self._losses.weigh if places.num_replicas > 1 else None,
            read=options.clock.read,
        )
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
        # Before the agreement, so that an error in it can name the rows of the other ranks.
        compiled = self._programs.of(mode, self._num_microbatches)
        with self._failing_together():
            self._begin()  # 1 after a failed step, all ranks start afresh
            batch = self._admit(mode, call, memory)  # 2 split the batch; one exchange, in which all ranks agree
            compiled = self._programs.of(mode, len(batch.microbatches), self._most_microbatches(batch))
            step = self._make_step(mode, batch)
            patience = self._compilations.in_step(batch.agreed, flatten((call.args, call.target))[0])
            del batch  # 3 from here on the step alone holds the data, and all that is made of them
            of_step = self._observers_of_step(compiled, call, memory)  # 4 what looks at this step alone
            with patience, step, keeping_what_is_lost(self._device):
                # Over before the exchange: what raises at its end must fail the step on all ranks too.
                with self._around_loop(mode, compiled, step, of_step):
                    run_step(compiled, step, self._failures.board.note, compiled.bounds_with(of_step))  # 5 the loop
                result = self._share(step, of_step)  # 6 every rank gets the losses
            self._failures.end()
        self.step_number += mode.is_training
        return result

    @contextmanager
    def no_sync(self, *, tied: bool) -> Iterator[None]:
        """Average no gradients over replicas in the steps within; without `tied`, sum none over ranks either."""
        before = self._is_synced, self._sums_tied
        self._is_synced, self._sums_tied = False, self._sums_tied and tied
        try:
            yield
        finally:
            self._is_synced, self._sums_tied = before

    def close(self) -> None:
        """Leave the others; no step can be run any more."""
        self._failures.close()
        self._places.close()

    # ---- what runs

    def _compile(self, program: Program) -> CompiledProgram:
        rank, options = self._transport.rank, self._options
        patience_s = COMPILE_DEADLINE_S if self._compilations.has_compiled_layers else options.deadline_s
        randomness = Randomness(
            options.seed,
            default_generators(self._device),
            self._places.replica * self._num_microbatches,
            patience_s,
        )
        units = self.parameters.unit_of.items()
        stores = {stage: unit.gradients for stage, unit in units}
        copied = {stage: unit.layout.copied for stage, unit in units if isinstance(unit.layout, Sharded)}
        context = CompileContext(
            program,
            rank,
            RankRows.of(program, rank),
            compose_stages(program, self._assembly.stages, self._assembly.skips, randomness, stores, copied),
            self._messenger,
            self.parameters,
            self._places.within_replica(self._failures.board.row_of),
        )
        changes: list[Change] = []
        if options.overlap is not None:
            note, first = self._failures.board.note, int(program.offsets[rank])
            changes.append(overlapping(program, options.overlap, self._device, lambda row: note(row - first)))
        return compile_program(context, self._observers, changes)

    # ---- the parts of a step, in order

    def _begin(self) -> None:
        if self._failures.has_failed:
            self._failures.recover()
            # A rank that tried a step by itself meanwhile has noted layouts that the others never saw.
            self._messenger.reset()
            self._admission.check_values_again()
        self._failures.begin(self._num_attempts)

    def _admit(self, mode: Mode, call: Call, memory: MemoryWatch | None) -> Batch:
        parameters, is_training = self.parameters, mode.is_training
        problem = parameters.refresh(is_synced=self._is_synced, sums_tied=self._sums_tied) if is_training else None
        batch = self._admission.admit(
            mode,
            call,
            problem,
            attempt=self._num_attempts,
            step_number=self.step_number if self._options.seed is not None and is_training else 0,
            trained=parameters.trained() if is_training else 0,
            scale=parameters.scale if is_training else 0.0,
            is_synced=self._is_synced,
            sums_tied=self._sums_tied,
            extra=_extra_of(call, memory),
            num_compilations=self._compilations.told(),
        )
        # From the largest of all ranks: one that tried a step alone is ahead, and its number must not come twice, or a
        # message of the step that failed could pass for one of this step.
        self._num_attempts = batch.agreed.attempt + 1
        if is_training:
            parameters.agree_on_tied(batch.agreed.trained)
        # A recording needs the moments of arrivals, an overlapped pair its inputs before its own streams begin.
        is_ahead = self._options.run_ahead is not None and self._options.overlap is None and not call.record
        self._messenger.begin(batch.agreed.signature, follows=is_ahead)
        return batch

    def _most_microbatches(self, batch: Batch) -> int:
        """Return for how many microbatches a program gathers, with shards: an evaluation of few rows has fewer."""
        own = len(batch.microbatches)
        return own if batch.job is None or not self.parameters.is_sharded else batch.job.most_microbatches

    def _make_step(self, mode: Mode, batch: Batch) -> Step:
        return Step(
            batch.slices,
            self._losses.of(batch, is_training=mode.is_training),
            output_rank(self._placement) in batch.agreed.wanting_outputs,
            prefetcher=batch.prefetcher,
            number=self.step_number,
            serial=batch.agreed.attempt,
            is_training=mode.is_training,
            is_frozen=batch.agreed.is_frozen,
            is_synced=self._is_synced,
            sums_tied=self._sums_tied,
        )

    def _observers_of_step(self, compiled: CompiledProgram, call: Call, memory: MemoryWatch | None) -> list[Observer]:
        found: list[Observer] = [*message_log(), *([] if memory is None else [memory])]
        if call.checks_values:
            attribute = self._options.gradient_attribute
            found.append(
                ValueChecks(self._transport.rank, self._assembly.stages, attribute, names=self._places.names_of_replica)
            )
        if not call.record:
            return found
        clock, rank, deadline_s = self._options.clock, self._transport.rank, self._options.deadline_s
        recorder = recorder_for(self._device, compiled.rows, clock, rank=rank, deadline_s=deadline_s)
        recording = StepRecording(
            self._transport,
            compiled.program,
            recorder,
            self._clocks,
            self._messenger.layouts.output_bytes,
            self._assembly.early_weights,
        )
        return [recording, recorder, *found]

    @contextmanager
    def _around_loop(
        self, mode: Mode, compiled: CompiledProgram, step: Step, of_step: Sequence[Observer]
    ) -> Iterator[None]:
        """Run the calls of a step in here; outputs and the end of its messages follow."""
        is_evaluation = evaluating(self._assembly.stages) if mode is Mode.EVALUATE else nullcontext()
        with is_evaluation, observing([*of_step, *self._observers], step):
            with self.parameters.running(step):
                yield
            if step.keeps_outputs:
                collect_outputs(self._messenger, step, compiled.program, self._transport.rank)
            # Past the last row: peers take all that this rank was sent as used, and release it.
            self._failures.board.note(len(compiled.rows))
            self._messenger.finish()
            self._admission.end_copies()

    def _share(self, step: Step, of_step: Sequence[Observer]) -> StepResult:
        outputs = self._merged_outputs(step)  # before the exchange: a rule that raises must fail the step on all ranks
        result = replace(self._exchange.share(step.losses), outputs=outputs)
        for recording in (each for each in of_step if isinstance(each, StepRecording)):
            self.recording = recording.recording
        return result if step.prefetcher is None else replace(result, data_times=step.prefetcher.times)

    def _merged_outputs(self, step: Step) -> Any:
        if not step.outputs:
            return None
        options = self._options
        try:
            return merge_slices_and_microbatches(step, options.merge, options.merge_slices, options.slice_dim)
        except Exception as error:
            note_place(error, "the merge of the outputs")
            raise

    # ---- failures

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn any error into one that every rank raises, and leave nothing of the step behind."""
        attempt = self._num_attempts
        try:
            yield
        except BaseException as error:
            # Only before the ranks have agreed do all of them refuse. Later it comes from the user's code on this rank,
            # such as a layer with a pipeline of its own, and is an error like any other.
            if isinstance(error, StepRefused) and self._num_attempts == attempt:
                self._failures.end()
                raise
            report = self._failures.report(error)
            # Only after the report, which has aborted the transport: nobody waits for these messages any more.
            self._messenger.reset()
            self._compilations.forget()
            with suppress(RuntimeError, PipelineError):  # what a device that has failed says to this
                self._admission.end_copies(has_failed=True)
            if not isinstance(error, Exception):
                raise  # an interrupt is the caller's to handle; the other ranks have been told
            raise report from error
        finally:
            for module in self._auxiliary:
                module.end()


def _extra_of(call: Call, memory: MemoryWatch | None) -> Extra:
    if memory is not None:
        return Extra.MEMORY
    if call.checks_values:
        return Extra.VALUES
    return Extra.RECORDING if call.record else Extra.NOTHING
