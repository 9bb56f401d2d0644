"""The training loop: every rank runs it from top to bottom, and rank 0 writes and speaks."""

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from penstock.errors import PenstockError, PenstockWarning
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.world import default_transport
from penstock.ir.timeline import Timeline
from penstock.models import LayerSpec, count_parameters
from penstock.pipeline import Pipeline
from penstock.planning import few_microbatches
from penstock.train.claim import Start, claimed_together, joined
from penstock.train.config import RunConfig
from penstock.train.data import Batch, TokenDataset
from penstock.train.devices import describe_devices, device_of_rank
from penstock.train.early_stop import EarlyStop
from penstock.train.generation import sample, sample_prompt
from penstock.train.metrics import MetricsWriter, StepMetrics
from penstock.train.optional_packages import describe_missing_pictures, require_packages
from penstock.train.precision import Precision
from penstock.train.progress import screen_of
from penstock.train.recorded_step import RecordedStep, read_recorded_step, recorded_step_to_json
from penstock.train.report import Outcome, predict_again, write_report
from penstock.train.resuming import Progress, RunCheckpoints, begin_with_weights
from penstock.train.run_folder import SCHEDULE, TIMELINE, WEIGHTS, RunFolder
from penstock.train.run_log import run_log
from penstock.train.setup import (
    build_layers,
    build_pipeline,
    build_trainer,
    check_together,
    prepare_together,
)
from penstock.train.split import choose_split
from penstock.train.step import StepOutcome, Trainer, require_finite
from penstock.train.stopping import StopRequest
from penstock.train.together import failing_together
from penstock.train.weights import save_weights

PREPARING_DEADLINE_S = 3600.0
"""How long ranks wait for rank 0 to tokenize the text, which takes longer than any step."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a run came to, on every rank alike."""

    num_steps: int
    """Optimizer steps that ran."""
    loss: float
    """Of the last step, in nats per token."""
    held_out_loss: float | None
    """After the last step, in nats per token; None where it was not asked for."""
    recorded: RecordedStep | None
    """What was measured at the step to record; None where none was."""

    @property
    def timeline(self) -> Timeline | None:
        return None if self.recorded is None else self.recorded.timeline


def train(
    config: RunConfig,
    *,
    output: TextIO,
    start: Start = Start.BY_RULE,
    is_claimed: bool = False,
    stop: StopRequest | None = None,
) -> TrainingResult:
    """Train a run as one of its ranks; torch.distributed is initialized where there are several.

    Everything that is left behind lies in the run folder, which `start` chooses, unless `is_claimed`: then the caller
    holds the folder of the configuration. A run that is found there continues. Lines for people go to `output`, from
    rank 0 alone. `stop` asks to stop between two steps.

    Raises:
        ConfigError, FormatError, ScheduleError, PartitionError: a setting is wrong.
        PenstockError: a file cannot be written, or the loss is not finite any more.
        CheckpointError: no checkpoint of a run that has some can be loaded, or one cannot be written.
        PipelineError: a rank failed, or did not answer within the deadline.
        KeyboardInterrupt: on every rank, when the run has stopped since one was asked to.
    """
    begin_s = time.monotonic()
    with ExitStack() as stack:
        with closing(default_transport(None, PREPARING_DEADLINE_S)) as transport:
            check_together(config, transport, require_packages)
            if not is_claimed:
                config = stack.enter_context(claimed_together(config, transport, start, output))
            folder = RunFolder(Path(config.run.folder))
            stack.enter_context(joined(folder.path))
            # The tokens and the folder are there, for all ranks, or all of them end here.
            _tell(transport.rank, output, _describe_devices(config))
            _tell(transport.rank, output, "preparing the text ...")
            dataset = prepare_together(config, folder, transport, output)
            prompt = sample_prompt(config)
            _begin_together(config, folder, transport, output, is_forced=start is Start.FORCE)
            stack.enter_context(run_log(folder.path, transport.rank, config.debug.log))
            _tell(transport.rank, output, "building the model ...")
            layers = build_layers(config, dataset.vocabulary)
            rule = choose_split(config, layers, dataset, folder, transport)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PenstockWarning)  # told below, in this program's own words
                pipeline = stack.enter_context(closing(build_pipeline(config, layers, rule)))
        if pipeline.rank == 0:
            folder.write(SCHEDULE, pipeline.schedule.to_csv().encode())
            screen, advice = screen_of(output), few_microbatches(pipeline.program)
            output.write(f"{screen.wrapped(_opening(config, layers, dataset))}\n")
            output.write(pipeline.describe_split(width=screen.width))
            output.write(f"{screen.wrapped(rule.note)}\n" if rule.note else "")
            output.write(f"{screen.wrapped(f'note: {advice}')}\n" if advice else "")
            missing = describe_missing_pictures(config)
            output.write(f"{screen.wrapped(missing)}\n" if missing else "")
            _tell(pipeline.rank, output, "first step ...")
        result = _run_steps(config, pipeline, dataset, folder, output, stop or StopRequest())
        save_weights(folder.path / WEIGHTS, pipeline)
        if pipeline.rank == 0:
            _report(config, result, folder, output, duration_s=time.monotonic() - begin_s)
        if prompt:
            _tell(pipeline.rank, output, f"\nsample:\n{config.sample.prompt}", end="")
            for piece in sample(config, pipeline, prompt):
                _tell(pipeline.rank, output, piece, end="")
            _tell(pipeline.rank, output, "")
        return result


def _tell(rank: int, output: TextIO, what: str, end: str = "\n") -> None:
    """Say at once what is begun, before it takes its time."""
    if rank == 0:
        output.write(f"{what}{end}")
        output.flush()


def _begin_together(
    config: RunConfig, folder: RunFolder, transport: Transport, output: TextIO, *, is_forced: bool
) -> None:
    with failing_together(transport):
        if transport.rank == 0:
            note = folder.begin(config, is_forced=is_forced)
            output.write(f"{note}\n" if note else "")


@dataclass(frozen=True, slots=True)
class _Batches:
    """The batches of one optimizer step, read when they are asked for."""

    dataset: TokenDataset
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return self.dataset.batch(self.first + index)


@dataclass(slots=True, eq=False)
class _Run:
    """A run under way, the same on every rank."""

    config: RunConfig
    dataset: TokenDataset
    held_out: Sequence[Batch]
    trainer: Trainer
    recorded: RecordedStep | None = None

    def step(self, step: int) -> StepMetrics:
        """Run one optimizer step, counted from 1, and evaluate where it is due."""
        begin_s = time.monotonic()
        bubble_every = self.config.metrics.bubble_every
        is_recorded = step == self.config.recorded_step or (bubble_every > 0 and step % bubble_every == 0)
        plan = self.config.batch_plan
        batches = _Batches(self.dataset, plan.begin(step), plan.count(step))
        outcome = self.trainer.step(step, batches, record=is_recorded, skip_update=self.config.run.skip_updates)
        duration_s = time.monotonic() - begin_s
        if step == self.config.recorded_step:
            self.recorded = outcome.recorded
        return StepMetrics(
            step=step,
            loss=outcome.loss,
            num_tokens=self.config.batch.size * self.config.batch.length * len(batches),
            duration_s=duration_s,
            learning_rate=outcome.learning_rate,
            gradient_norm=outcome.gradient_norm,
            bubble_fraction=None if outcome.recorded is None else outcome.recorded.timeline.bubble_fraction,
            held_out_loss=self._held_out_loss(step, outcome),
            loss_scale=outcome.loss_scale,
            num_skipped=self.trainer.update.num_skipped,
        )

    def _held_out_loss(self, step: int, outcome: StepOutcome) -> float | None:
        every = self.config.run.evaluate_every
        is_due = step == self.config.run.steps or (every > 0 and step % every == 0)
        if not (self.held_out and is_due):
            return None
        loss = self.trainer.evaluate(self.held_out)
        require_finite("the held-out loss", loss, step, outcome.learning_rate)
        return loss


def _run_steps(
    config: RunConfig,
    pipeline: Pipeline,
    dataset: TokenDataset,
    folder: RunFolder,
    output: TextIO,
    stop: StopRequest,
) -> TrainingResult:
    num_held_out = config.run.evaluate_batches
    held_out = dataset.held_out_batches(num_held_out) if num_held_out else []
    begin_with_weights(config, folder, pipeline, output)
    run = _Run(config, dataset, held_out, build_trainer(config, pipeline))
    early_stop = EarlyStop(config.run.patience)
    checkpoints = RunCheckpoints(config, folder, run.trainer, early_stop, stop, data=dataset.digest, output=output)
    progress = checkpoints.resume()
    first_step = progress.step + 1
    with ExitStack() as stack:
        writer = None
        if pipeline.rank == 0:
            how = MetricsWriter(
                folder.path, config.metrics, num_steps=config.run.steps, output=output, first_step=first_step
            )
            writer = stack.enter_context(how)
        stack.enter_context(stop.watched(2 * config.run.deadline_s))
        for step in range(first_step, config.run.steps + 1):
            metrics = run.step(step)
            if writer is not None:
                writer.write(metrics)
            if writer is not None and run.recorded is not None and run.recorded.step == step:
                # At once: whoever asks where the time goes should not have to wait for the run's end.
                folder.write(TIMELINE, recorded_step_to_json(run.recorded))
            is_last = early_stop.note(metrics.held_out_loss) or step == config.run.steps
            progress = Progress(step, metrics.loss, metrics.held_out_loss)
            checkpoints.after_step(progress, is_last=is_last)
            if is_last and step < config.run.steps:
                _tell(pipeline.rank, output, f"stopped early: {early_stop.describe()}")
                break
        checkpoints.finish()
    assert progress.loss is not None, "a run has at least one step"
    recorded = run.recorded or _recorded_before(folder, first_step, config)
    return TrainingResult(progress.step, progress.loss, progress.held_out_loss, recorded)


def _recorded_before(folder: RunFolder, first_step: int, config: RunConfig) -> RecordedStep | None:
    """Return the step that was recorded before the run was interrupted; None where it was lost, or none was."""
    if not (0 < config.recorded_step < first_step and (folder.path / TIMELINE).exists()):
        return None
    try:
        return read_recorded_step(folder.path)
    except PenstockError:
        return None


def _describe_devices(config: RunConfig) -> str:
    precision = Precision(config.precision).describe(config.model)
    return describe_devices(device_of_rank(config), config.pipeline.ranks, precision)


def _opening(config: RunConfig, layers: Sequence[LayerSpec], dataset: TokenDataset) -> str:
    pipeline = config.pipeline
    return (
        f"{count_parameters(layers):,} parameters, {len(dataset.train_tokens):,} tokens to train on, "
        f"{pipeline.schedule} on {pipeline.ranks} {'rank' if pipeline.ranks == 1 else 'ranks'}, "
        f"{pipeline.microbatches} microbatches, {config.run.steps} steps"
    )


def _report(config: RunConfig, result: TrainingResult, folder: RunFolder, output: TextIO, *, duration_s: float) -> None:
    outcome = Outcome(result.num_steps, duration_s, result.loss, result.held_out_loss, config.recorded_step)
    for line in write_report(folder, outcome, predict_again(result.timeline)):
        output.write(f"{screen_of(output).wrapped(line)}\n")
