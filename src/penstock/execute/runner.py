"""The runner: takes one rank through a step, from the agreement on the batch to the exchange of the losses.

Any error on the way ends the step on all ranks, as one error, and leaves nothing of it behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from penstock.errors import ConfigError, PipelineError, StepRefused
from penstock.execute.accelerator import is_queued
from penstock.execute.batch.admission import Admission, Batch, StepRequest
from penstock.execute.compile.programs import CompiledPrograms
from penstock.execute.control.agreement import AgreedStep, Extra, Mode
from penstock.execute.control.collectives import Control, closed_error, refuse_within_step
from penstock.execute.control.compilations import COMPILE_DEADLINE_S, Compilations
from penstock.execute.control.failures import FailureReporter
from penstock.execute.losses.exchange import LossExchange
from penstock.execute.losses.results import StepResult
from penstock.execute.lost_device import keeping_what_is_lost
from penstock.execute.observing.clock import ClockComparison
from penstock.execute.observing.log import log_plan
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.observing.observer import observing
from penstock.execute.observing.out_of_memory import explaining_out_of_memory
from penstock.execute.observing.recorder import Recording, StepRecording
from penstock.execute.observing.selection import Observers
from penstock.execute.outputs import collect_outputs, merged_outputs, output_rank
from penstock.execute.parameters.tied import copy_digests
from penstock.execute.run import run_step
from penstock.execute.session import Session
from penstock.execute.stages.auxiliary import Auxiliary
from penstock.execute.stages.evaluation import evaluating
from penstock.execute.stages.feature import modules_with
from penstock.execute.step import Step
from penstock.execute.transport.messages import Messenger
from penstock.execute.values.tree import flatten


class Runner:
    """Runs the steps of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        places, device, options = session.places, session.device, session.options
        control, layers = Control.of(places), session.assembly.layers
        self._control = control
        self._compilations = Compilations(places, session.board, layers)
        self._observers = Observers(
            control,
            session.assembly,
            ClockComparison(places.pipeline, device, options.clock, session.agreed.each("clock_host")),
            debug=options.debug,
            ranges=options.ranges,
            run_ahead=options.run_ahead,
            user_observers=options.observers,
            gradient_attribute=options.gradient_attribute,
        )
        self._messenger = Messenger(self._observers.messages, device, has_variable_shapes=options.variable_shapes)
        longest_wait_s = COMPILE_DEADLINE_S if self._compilations.has_compiled_layers else options.deadline_s
        self._programs = CompiledPrograms(session, self._messenger, self._observers.of_all_steps, longest_wait_s)
        throttle = self._observers.throttle
        # Without events a device cannot wait for a message by itself. A CPU computes when it is told to.
        self._may_lead = options.run_ahead is not None and (throttle is not None or not is_queued(device))
        rows_of = {} if throttle is None else {"rows_of": throttle.rows_of}
        self._failures = FailureReporter(places, session.board, self._programs.describe, **rows_of)
        self._admission = Admission(
            control,
            options.batch_rule(session.schedule),
            session.needs,
            stream_rules=options.stream_rules(),
            checks_values=options.check_batches,
            weigh=session.losses.weigh if places.num_replicas > 1 else None,
            # With debug="values" an observer compares the copies themselves, before every step.
            digest_copies=lambda: () if options.debug == "values" else copy_digests(session.parameters.copies),
            read=options.clock.read,
        )
        self._exchange = LossExchange(control, device)
        self._auxiliary: list[Auxiliary] = modules_with(layers, Auxiliary)
        self._num_attempts = 0  # steps that have begun, also those that failed; the ranks agree on it with each
        self.step_number = 0
        """The number of training steps that have succeeded: layers draw their random numbers by it."""
        self._is_closed = False
        self.recording: Recording | None = None
        """The measurements of the last recorded step, on every rank."""
        log_plan(session.schedule, places.pipeline.rank)

    def run(self, mode: Mode, call: StepRequest, memory: MemoryWatch | None = None) -> StepResult:
        """Run one step; every rank calls it. `memory`, if any, looks at what this rank holds meanwhile.

        Raises:
            ConfigError: there is no loss, or no backward, to train with.
            StepRefused: on every rank, before anything ran.
            PipelineError: on every rank, if the step fails on any; the next one starts afresh.
        """
        if mode.is_training and call.refusal is None:
            self._require_trainable()
        session, options, board = self.session, self.session.options, self.session.board
        if self._is_closed:
            raise closed_error(session.places)
        # Before the agreement, so that an error in it can name the rows of the other ranks.
        self._programs.of(mode, session.schedule.num_microbatches)
        with self._failing_together():
            if self._failures.begin(self._num_attempts):  # 1 after a failed step, all ranks start afresh
                # A rank that tried a step by itself meanwhile has noted layouts that the others never saw.
                self._messenger.reset()
                self._admission.check_values_again()
            agreed, batch = self._admit(mode, call)  # 2 split the batch; one exchange, in which all agree
            most = max(len(batch.microbatches), agreed.most_microbatches if options.is_sharded else 0)
            compiled = self._programs.of(mode, len(batch.microbatches), most)
            step = self._make_step(agreed, batch)
            compiling = self._compilations.in_step(agreed, flatten((call.args, call.target))[0])
            del batch  # 3 from here on the step alone holds the data, and all that is made of them
            of_step = self._observers.of_step(call.extra, compiled.program, self._messenger, memory)  # 4 what looks on
            observed = observing([*of_step, *self._observers.of_all_steps], step)
            evaluation = evaluating(session.assembly.stages) if mode is Mode.EVALUATE else nullcontext()
            explaining = explaining_out_of_memory(session.assembly.stages, session.device, step)
            with compiling, step, keeping_what_is_lost(session.device), explaining:
                # Over before the exchange: what raises at its end must fail the step on all ranks too.
                with evaluation, observed, session.parameters.running(step):
                    run_step(compiled, step, board.note, compiled.bounds_with(of_step))  # 5 the loop
                    collect_outputs(self._messenger, step, compiled.program, compiled.rank)
                    # Past the last row: peers take all that this rank was sent as used, and release it.
                    board.note(len(compiled.rows))
                    self._messenger.finish()
                    self._admission.end_copies()
                outputs = merged_outputs(step, options.merge, options.merge_slices, options.slice_dim)
                result = self._exchange.share(step.losses)  # 6 every rank gets the losses
            self._failures.end()
        self.step_number += mode.is_training
        if (recorder := next((look for look in of_step if isinstance(look, StepRecording)), None)) is not None:
            self.recording = recorder.recording and self._described(recorder.recording)
        return replace(result, outputs=outputs, data_times=None if step.prefetcher is None else step.prefetcher.times)

    def error(self, text: str) -> PipelineError:
        """Return an error of this rank, whose name the text begins with."""
        places = self.session.places
        return PipelineError(f"{places.name}: {text}", rank=places.names.numbers[places.index])

    def close(self) -> None:
        """Leave the others; no step can be run any more."""
        if self._is_closed:
            return
        if self._control.calls.is_in_step:
            refuse_within_step(self._control)
        self._is_closed = True
        self._failures.close()
        self.session.places.close()

    def _require_trainable(self) -> None:
        if not self.session.losses.has_loss:
            raise ConfigError("a training step needs a loss; pass loss=... to Pipeline, or call evaluate", key="loss")
        if self.session.schedule.is_forward_only:
            name = self.session.schedule.name
            raise ConfigError(f"{name} has no backwards to train with; call evaluate", key="schedule")

    def _described(self, recording: Recording) -> Recording:
        """Add to the timeline of a step that was just recorded all that is known of the step and its model."""
        session = self.session
        timeline = replace(
            recording.timeline,
            step=self.step_number,
            message_bytes=recording.message_bytes,
            layers_of_stage=tuple(session.layers_of_stage),
            layer_weights=tuple(session.layer_weights),
            early_weights=recording.early_weights,
            num_replicas=session.places.num_replicas,
        )
        return replace(recording, timeline=timeline)

    def _admit(self, mode: Mode, call: StepRequest) -> tuple[AgreedStep, Batch]:
        parameters, options, is_training = self.session.parameters, self.session.options, mode.is_training
        agreed, batch = self._admission.admit(
            mode,
            call,
            parameters.refresh() if is_training else None,
            attempt=self._num_attempts,
            step_number=self.step_number if options.seed is not None and is_training else 0,
            num_compilations=self._compilations.num_reported(),
            **parameters.proposed(is_training=is_training),
        )
        # From the largest of all ranks: one that tried a step alone is ahead, and its number must not come twice, or a
        # message of the step that failed could pass for one of this step.
        self._num_attempts = agreed.attempt + 1
        if is_training:
            parameters.agree_on_tied(agreed.trained)
        # A recording needs the moments of arrivals, an overlapped pair its inputs before its own streams begin.
        is_ahead = self._may_lead and options.overlap is None and call.extra is not Extra.RECORDING
        self._messenger.begin(agreed.signature, follows=is_ahead)
        return agreed, batch

    def _make_step(self, agreed: AgreedStep, batch: Batch) -> Step:
        return Step(
            batch.slices,
            self.session.losses.of(batch, agreed),
            output_rank(self.session.schedule.placement) in agreed.wanting_outputs,
            prefetcher=batch.prefetcher,
            number=self.step_number,
            serial=agreed.attempt,
            is_training=agreed.is_training,
            is_frozen=agreed.is_frozen,
            is_synced=self.session.parameters.is_synced,
            sums_tied=self.session.parameters.sums_tied,
        )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn any error into one that every rank raises, and leave nothing of the step behind."""
        attempt, calls = self._num_attempts, self._control.calls
        is_inner_step = calls.is_in_step
        if is_inner_step:
            refuse_within_step(self._control)
        calls.is_in_step = True
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
            calls.is_in_step = is_inner_step
            for module in self._auxiliary:
                module.end()
