"""The runner: takes one rank through a step, from the agreement on the batch to the exchange of the losses.

Any error on the way ends the step on all ranks, as one error, and leaves nothing of it behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from penstock.errors import ConfigError, PipelineError, StepRefused
from penstock.execute.accelerator import is_queued
from penstock.execute.batch.admission import Admission
from penstock.execute.batch.host_to_device import copies_for
from penstock.execute.batch.local_batch import Batch, BatchCutter, StepRequest
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
from penstock.execute.outputs import collect_outputs, merged_outputs, ranks_of_outputs
from penstock.execute.parameters.tied import copy_digests
from penstock.execute.run import run_step
from penstock.execute.session import ProgramKey, Session
from penstock.execute.stages.auxiliary import Auxiliary
from penstock.execute.stages.evaluation import evaluating
from penstock.execute.stages.feature import modules_with
from penstock.execute.step import Step
from penstock.execute.transport.messages import Messenger
from penstock.execute.values.tree import flatten
from penstock.ir.program import Program


class Runner:
    """Runs the steps of one rank."""

    def __init__(self, session: Session) -> None:
        """Make what the steps of this rank need, from all that it has of a pipeline.

        The parts are made here in the order in which they need each other. No message goes to another rank.
        """
        self.session = session
        places, device, options = session.places, session.device, session.options
        control, layers = Control.of(places), session.assembly.layers
        self._control = control
        self._compilations = Compilations(places, session.board, layers)
        # Observers look at the calls of a step. One of them may check the messages, so the messenger sends by it.
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
        self._messenger = Messenger(
            self._observers.messages,
            device,
            has_variable_shapes=options.variable_shapes,
            model=options.transport_model,
        )
        # Each mode (training, evaluation) has a program, which is compiled to a list of calls at its first step.
        longest_wait_s = COMPILE_DEADLINE_S if self._compilations.has_compiled_layers else options.deadline_s
        self._programs = CompiledPrograms(session, self._messenger, self._observers.of_all_steps, longest_wait_s)
        # The host may queue work behind a receive that has not arrived, up to the limit of the throttle. A device that
        # queues its work needs events for this, and has no throttle without them. A CPU computes when it is told to.
        throttle = self._observers.throttle
        self._may_run_ahead = options.run_ahead is not None and (throttle is not None or not is_queued(device))
        # An error of a device may come late: the throttle then knows which rows of the program were still at work.
        rows_of = {} if throttle is None else {"rows_of": throttle.rows_of}
        self._failures = FailureReporter(places, session.board, self._programs.describe, **rows_of)
        # The admission cuts a batch into microbatches, and lets all ranks agree on the step.
        self._cutter = self._make_cutter()
        self._admission = Admission(
            control,
            self._cutter,
            checks_values=options.check_batches,
            weigh=session.losses.weigh if places.num_replicas > 1 else None,
            # Digests show whether copies of tied parameters are equal on all ranks. With debug="values" an observer
            # compares the copies themselves, before every step.
            digest_copies=lambda: () if options.debug == "values" else copy_digests(session.parameters.copies),
        )
        self._exchange = LossExchange(control, device)
        self._auxiliary: list[Auxiliary] = modules_with(layers, Auxiliary)
        self._num_attempts = 0
        """The number of steps that have begun, also of those that failed; the ranks agree on it in every step."""
        self.step_number = 0
        """The number of training steps that have succeeded: layers draw their random numbers by it."""
        self._is_closed = False
        self.recording: Recording | None = None
        """The measurements of the last recorded step, on every rank."""
        log_plan(session.schedule, places.pipeline.rank)

    def _make_cutter(self) -> BatchCutter:
        places, options, needs = self.session.places, self.session.options, self.session.needs
        rule = options.batch_rule(self.session.schedule)
        return BatchCutter(
            places.pipeline.rank,
            places.name,
            rule,
            needs,
            options.stream_rules(),
            copies_for(places.pipeline, needs, rule.slices, one_stream=options.one_stream),
            options.clock.read,
            num_steps=lambda: self.step_number,
            require_program=self._programs.require,
        )

    def run(self, mode: Mode, call: StepRequest, memory: MemoryWatch | None = None) -> StepResult:
        """Run one step on this rank, and return the losses and, where they were asked for, the outputs.

        Every rank calls this method with its own part of the batch. `call` has the arguments of the user's `step` or
        `evaluate`; the optional `memory` is an observer that measures the memory of this rank during the step. Where
        the call asks for a recording of the step, `recording` has it afterwards.

        Raises:
            ConfigError: there is no loss, or no backward, to train with.
            StepRefused: on every rank, before anything ran.
            PipelineError: on every rank, if the step fails on any; the next step starts afresh.
        """
        if mode.is_training and call.refusal is None:
            self._require_trainable()
        session, options, board = self.session, self.session.options, self.session.board
        if self._is_closed:
            raise closed_error(session.places)
        # An error in the agreement below names what the other ranks run, by the program that was asked for last. So
        # this rank asks for the program of the usual number of microbatches first.
        num_usual = session.schedule.num_microbatches
        self._programs.of(ProgramKey(mode, num_usual, num_usual))
        with self._failing_together():
            # 1. After a failed step, `begin` lets all ranks meet again. A rank that tried a step alone since then has
            # noted layouts of messages that the other ranks never saw, so all ranks forget theirs.
            has_met_again = self._failures.begin(self._num_attempts)
            if has_met_again:
                self._messenger.reset()
                self._admission.check_values_again()
            # 2. Cut the batch into microbatches; in one exchange all ranks agree on the step. The program is that for
            # this number of microbatches. An evaluation of few rows may have fewer in one replica than in another;
            # replicas that shard parameters then gather weights as often as the replica with the most microbatches.
            agreed, batch = self._admit(mode, call)
            num_microbatches = len(batch.microbatches)
            most_microbatches = max(num_microbatches, agreed.most_microbatches if options.is_sharded else 0)
            is_planned = mode is Mode.TRAIN and num_microbatches in agreed.planned
            key = ProgramKey(mode, num_microbatches, most_microbatches)
            compiled = self._programs.of(key, is_planned=is_planned)
            self._begin_messages(agreed, batch, compiled.program, call.extra)
            # 3. From here on the step alone holds the data, so that it can free them early.
            step = self._make_step(agreed, batch)
            compiling = self._compilations.in_step(agreed, flatten((call.args, call.target))[0])
            del batch
            # 4. Make the contexts of the step; the observers of this step alone come before those of all steps.
            step_observers = self._observers.of_step(call.extra, compiled.program, self._messenger, memory)
            observed = observing([*step_observers, *self._observers.of_all_steps], step)
            evaluation = evaluating(session.assembly.stages) if mode is Mode.EVALUATE else nullcontext()
            explaining = explaining_out_of_memory(session.assembly.stages, session.device, step)
            with compiling, step, keeping_what_is_lost(session.device), explaining:
                # 5. Run the forwards, backwards and messages. These contexts end before the losses are exchanged: an
                # error at their end, such as that of an observer, must fail the step on all ranks too.
                with evaluation, observed, session.parameters.running(step):
                    bounds = compiled.bounds_with(step_observers) if step_observers else compiled.bounds
                    run_step(compiled, step, board.note, bounds)
                    collect_outputs(self._messenger, step, compiled.program, compiled.rank)
                    # The board shows the other ranks that this one is past its last row. They conclude that it has
                    # used every message that they sent to it, and release the memory of these messages.
                    board.note(len(compiled.rows))
                    self._messenger.finish()
                    self._cutter.end_copies()
                outputs = merged_outputs(step, options.merge, options.merge_slices, options.slice_dim)
                # 6. Every rank gets the losses of the last stage.
                result = self._exchange.share(step.losses)
            self._failures.end()
        self.step_number += mode.is_training
        recorder = next((observer for observer in step_observers if isinstance(observer, StepRecording)), None)
        if recorder is not None:
            self.recording = recorder.recording and self._described(recorder.recording)
        return replace(result, outputs=outputs, data_times=None if step.prefetcher is None else step.prefetcher.times)

    @property
    def program(self) -> Program:
        """The program of the step that ran last, or of a training step."""
        return self._programs.active or self.session.program

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
            planned=self.session.programs.planned(),
            has_alike_layouts=self._messenger.layouts.are_alike,
            **parameters.proposed(is_training=is_training),
        )
        # From the largest of all ranks: one that tried a step alone is ahead, and its number must not come twice, or a
        # message of the step that failed could pass for one of this step.
        self._num_attempts = agreed.attempt + 1
        if is_training:
            parameters.agree_on_tied(agreed.trained)
        return agreed, batch

    def _begin_messages(self, agreed: AgreedStep, batch: Batch, program: Program, extra: Extra) -> None:
        """Start the messages of a step, whose microbatches are told apart where their layouts are not known yet."""
        kinds: Sequence[str] = ()
        signature, routes = agreed.signature, program.route_of_microbatch.tolist()
        if any(routes):  # those of rounds may be others than those of what is planned for a number: other messages
            signature = f"{signature} by routes {routes}"
        if agreed.first_microbatch and not self._messenger.layouts.knows(signature):
            kinds = [
                f"{agreed.first_microbatch} {route} {[(part.size, part.length) for part in slices]}"
                for route, slices in zip(routes, batch.slices, strict=True)
            ]
        # A recording needs the moments of arrivals, an overlapped pair its inputs before its own streams begin.
        is_ahead = self._may_run_ahead and self.session.options.overlap is None and extra is not Extra.RECORDING
        self._messenger.begin(signature, kinds, follows=is_ahead)

    def _make_step(self, agreed: AgreedStep, batch: Batch) -> Step:
        return Step(
            batch.slices,
            self.session.losses.of(batch, agreed),
            ranks_of_outputs(agreed, self.session.schedule.placement),
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
        """Turn any error within this context into one that every rank raises, and drop what the step has left.

        A `StepRefused`, by which all ranks refuse a step alike, is raised as it is. An interrupt is, too, once the
        other ranks know of the failure. A step that a layer begins within a step of this pipeline is an error, unless
        the pipeline has one rank alone.
        """
        attempt, calls = self._num_attempts, self._control.calls
        is_inner_step = calls.is_in_step
        if is_inner_step:
            refuse_within_step(self._control)
        calls.is_in_step = True
        try:
            yield
        except BaseException as error:
            # All ranks refuse a step only before they have agreed on it, and the agreement counts an attempt. A later
            # StepRefused comes from the user's code on this rank, such as a layer with a pipeline of its own, and is
            # an error like any other.
            if isinstance(error, StepRefused) and self._num_attempts == attempt:
                self._failures.end()
                raise
            # The report finds the rank to blame, and aborts the transport. Only then nobody waits for the messages of
            # this step any more, and they may be dropped.
            report = self._failures.report(error)
            self._messenger.reset()
            self._compilations.forget()
            with suppress(RuntimeError, PipelineError):  # a device that has failed raises here once more
                self._cutter.end_copies(has_failed=True)
            if not isinstance(error, Exception):
                raise  # an interrupt is the caller's to handle
            raise report from error
        finally:
            calls.is_in_step = is_inner_step
            for module in self._auxiliary:
                module.end()
