"""`StepRunner`: runs the steps of a run one by one, and says what each was like."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.execute.undocumented_compiler import watch_compilations
from penstock.ir.timeline import Timeline
from penstock.show.picture import predict_again
from penstock.train.data.batches import BatchReader, Wants
from penstock.train.data.user_data import Dataset
from penstock.train.devices import peak_bytes
from penstock.train.settings.config import RunConfig
from penstock.train.step import Trainer, advice_on, require_finite
from penstock.train.stopping import refusing_exit
from penstock.train.watching.profiler_window import ProfilerWindow
from penstock.train.watching.progress import StepMetrics, StepOutcome
from penstock.train.watching.recorded_step import read_recorded_step

Say = Callable[[str], None]
"""Shows a line to people."""


class StepRunner:
    """The steps of a run under way; every rank has one and calls it alike."""

    def __init__(self, config: RunConfig, dataset: Dataset, trainer: Trainer) -> None:
        """Read what is evaluated; training batches follow in `reading`."""
        self.trainer = trainer
        self.recorded: Timeline | None = None
        """The step to record as it was measured, once it has run."""
        self._recorded_step = config.recorded_step
        self._config = config
        self._dataset = dataset
        pipeline, folder = trainer.pipeline, Path(config.run.folder)
        control = pipeline.control
        number = control.names.numbers[control.rank]
        self._profiler = ProfilerWindow(config.profile, folder, number, pipeline.device)
        num_held_out = config.run.evaluate_batches
        self._wants = Wants.of(trainer.pipeline)
        self._held_out = dataset.held_out_batches(num_held_out, self._wants) if num_held_out else []
        self._held_out_weights = dataset.held_out_weights(num_held_out) if num_held_out else None
        self._reader: BatchReader | None = None

    def continue_recording(self, first_step: int) -> None:
        """Take over the timeline recorded before `first_step`, unless its plan was another: other ranks, for example.

        Where the plan was another, or the timeline is lost, a later step is recorded as if the run began here. This is
        a collective.
        """
        if not 0 < self._recorded_step < first_step:
            return
        pipeline, run = self.trainer.pipeline, self._config.run
        earlier_timeline = None
        with suppress(PenstockError):
            earlier_timeline = read_recorded_step(Path(run.folder))
        current_plan = pipeline.program, tuple(pipeline.layers_of_stage), pipeline.num_replicas
        is_same = (
            earlier_timeline is not None
            and (earlier_timeline.program, earlier_timeline.layers_of_stage, earlier_timeline.num_replicas)
            == current_plan
        )
        if pipeline.control.all_gather_object(is_same)[0]:  # rank 0 writes the file
            self.recorded = earlier_timeline
        else:
            self._recorded_step = min(first_step - 1 + run.record_step, run.steps)

    @contextmanager
    def reading(self, first_step: int) -> Iterator[None]:
        """Read the batches from a step on, for as long as the block lasts; then write a profile that has begun."""
        config, plan = self._config, self._config.batch_plan
        reader = BatchReader(
            partial(self._dataset.batch, wants=self._wants),
            plan.begin(first_step),
            plan.begin(config.run.steps + 1),
            num_ahead=config.data.prefetch,
            limit_s=config.run.deadline_s,
        )
        with closing(reader), closing(self._profiler):
            self._reader = reader
            yield

    def run_step(self, step: int, say: Say = lambda line: None) -> StepMetrics:
        """Run one optimizer step, counted from 1, and evaluate where it is due; return its metrics.

        A step has one or more batches, whose gradients are summed. `say` shows people a line meanwhile. The step that
        is recorded, or every `metrics.bubble_every`-th, is measured instruction by instruction.
        """
        plan = self._config.batch_plan
        first_batch, num_batches = plan.begin(step), plan.count(step)
        batch_numbers = range(first_batch, first_batch + num_batches)
        assert self._reader is not None, "steps run within `reading`"
        self._reader.begin(first_batch, num_batches)
        every = self._config.metrics.bubble_every
        is_recorded = step == self._recorded_step or (every > 0 and step % every == 0)
        compilation = telling_compilation(f"step {step}", say)
        with refusing_exit(f"step {step}"), self._profiler.around(step), compilation as compiled:
            begin_s = time.monotonic()
            outcome = self.trainer.step(
                step,
                self._reader,
                shares=self._dataset.shares(first_batch, num_batches),
                record=is_recorded,
                skip_update=self._config.run.skip_updates,
            )
            duration_s = time.monotonic() - begin_s
        copies_every = self._config.debug.copies_every
        if copies_every and step % copies_every == 0:
            self.trainer.pipeline.require_equal_copies()
        if step == self._recorded_step:
            self.recorded = outcome.recorded
        return StepMetrics(
            step=step,
            outcome=outcome,
            num_tokens=sum(map(self._dataset.num_targets, batch_numbers)),
            duration_s=duration_s,
            bubble_fraction=None if outcome.recorded is None else outcome.recorded.bubble_fraction,
            held_out_loss=self._held_out_loss(step, outcome, say),
            num_skipped=self.trainer.update.num_skipped,
            predicted_bubble_fraction=self._predicted_bubble(outcome),
            peak_bytes=self._peak_bytes(step),
            is_slowed=is_recorded or self._profiler.has(step),
            has_compiled=bool(compiled),
        )

    def _predicted_bubble(self, outcome: StepOutcome) -> float | None:
        """Return the bubble fraction that the simulator predicts of a recorded step; None on all ranks but rank 0."""
        if outcome.recorded is None or self.trainer.pipeline.control.rank:
            return None
        try:
            return predict_again(outcome.recorded)["predicted"].bubble_fraction
        except PenstockError:  # a number that is only shown should not end a run
            return None

    def _peak_bytes(self, step: int) -> Sequence[int]:
        """Return the peak bytes so far of each rank of the first replica; empty where the step is not due.

        Where it is due, this is a collective.
        """
        every = self._config.metrics.memory_every
        if not every or (step % every and step != self._config.run.steps):
            return ()
        pipeline = self.trainer.pipeline
        bytes_by_rank: list[Any] = pipeline.control.all_gather_object(peak_bytes(pipeline.device))
        return bytes_by_rank[: pipeline.transport.num_ranks]

    def _held_out_loss(self, step: int, outcome: StepOutcome, say: Say) -> float | None:
        every = self._config.run.evaluate_every
        is_due = step == self._config.run.steps or (every > 0 and step % every == 0)
        if not (self._held_out and is_due):
            return None
        with telling_compilation(f"the evaluation after step {step}", say):
            loss = self.trainer.evaluate(self._held_out, self._held_out_weights)
        require_finite(
            "the held-out loss", loss, step, advice_on(outcome.learning_rate, self._config.optimizer.clip_norm)
        )
        return loss


@contextmanager
def telling_compilation(activity: str, say: Say) -> Iterator[list[str]]:
    """Say once if this process compiles layers while the block runs; yield a list that then holds the line.

    A first compilation may take a minute, and looks like a step that hangs.
    """
    lines: list[str] = []

    def begin() -> None:
        if not lines:
            lines.append(f"{activity} compiles the layers; that takes a while")
            say(lines[0])

    stop = watch_compilations(begin, lambda: None)
    try:
        yield lines
    finally:
        stop()
