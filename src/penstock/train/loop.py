"""The training loop: every rank runs it from top to bottom, and rank 0 of all writes and speaks."""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.checkpoints.weight_files import save_weights
from penstock.errors import PenstockWarning
from penstock.execute.control.collectives import Control
from penstock.execute.transport.world import default_transport
from penstock.pipeline import Pipeline
from penstock.train.claim import Start, claimed_together, joined
from penstock.train.data.chat_template import require_chat_template
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.data.user_data import Dataset
from penstock.train.document_leaks import require_separate_documents
from penstock.train.folder.run_folder import SCHEDULE, TIMELINE, RunFolder, run_log
from penstock.train.generation import prompt_tokens, sample
from penstock.train.measuring.split import choose_split
from penstock.train.model_check import check_model_together
from penstock.train.model_source import build_layers
from penstock.train.resuming import Progress, RunCheckpoints, begin_with_weights
from penstock.train.settings.config import RunConfig
from penstock.train.settings.optional_packages import require_packages
from penstock.train.setup import build_pipeline, build_trainer, check_together, prepare_together, with_digests
from penstock.train.step_runner import StepRunner
from penstock.train.stopping import EarlyStop, StopRequest
from penstock.train.together import same_words
from penstock.train.watching.metrics import MetricsWriter
from penstock.train.watching.progress import screen_of, write_line
from penstock.train.watching.report import TrainingResult, device_line, opening_lines, write_report
from penstock.train.watching.utilization import utilization_of

PREPARING_DEADLINE_S = 3600.0
"""Seconds that ranks wait for work of rank 0 alone before the first step, such as measuring layers. They wait for the
text as long as it is read and tokenized."""


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
            if transport.rank:
                output = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            config = with_digests(config)
            check_together(config, transport, require_packages, tokenizer_of, require_chat_template)
            if not is_claimed:
                config = stack.enter_context(claimed_together(config, transport, start, output))
            folder = RunFolder(Path(config.run.folder))
            stack.enter_context(joined(folder.path))
            # From here on all ranks hold the folder; where one could not, all of them have ended.
            write_line(output, device_line(config))
            write_line(output, "preparing the text ...")
            dataset = prepare_together(config, folder, transport, output)
            prompt = _prompt(config)
            begin_run = partial(folder.begin, config, is_forced=start is Start.FORCE)
            note = Control(transport).on_rank_0(begin_run, same_words)
            output.write(f"{note}\n" if note else "")
            stack.enter_context(run_log(folder.path, transport.rank, config.debug.log))
            write_line(output, "building the model ...")
            layers = build_layers(config, dataset.vocabulary)
            if note := check_model_together(config, dataset, folder, transport):
                write_line(output, note)
            split_rule = choose_split(config, layers, dataset, folder, transport)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PenstockWarning)  # `opening_lines` says the same in other words
                pipeline = stack.enter_context(closing(build_pipeline(config, layers, split_rule, dataset.vocabulary)))
        if pipeline.control.rank == 0:
            num_tokens = dataset.num_train_tokens
            for line in opening_lines(
                config, layers, num_tokens, pipeline, note=split_rule.note, screen=screen_of(output)
            ):
                output.write(f"{line}\n")
        stop = stop or StopRequest()
        result = _run_steps(config, pipeline, dataset, folder=folder, output=output, stop=stop)
        save_weights(folder.path, pipeline)
        if pipeline.control.rank == 0:
            screen = screen_of(output)
            for line in write_report(folder, result, time.monotonic() - begin_s, screen):
                output.write(f"{screen.wrapped(line)}\n")
        if prompt:
            _write_sample(config, pipeline, prompt, output)
        return result


def _prompt(config: RunConfig) -> list[int]:
    """Return the tokens of `sample.prompt`; none where the run ends without a sample. Raises: ConfigError."""
    text = config.sample.prompt
    return prompt_tokens(tokenizer_of(config), text, key="sample.prompt") if text else []


def _write_sample(config: RunConfig, pipeline: Pipeline, prompt: Sequence[int], output: TextIO) -> None:
    """Write the text that the trained model makes of the prompt, piece by piece; every rank calls it."""
    write_line(output, f"\nsample:\n{config.sample.prompt}", end="")
    for piece in sample(config, pipeline, prompt):
        write_line(output, piece, end="")
    write_line(output, "")


def _run_steps(
    config: RunConfig,
    pipeline: Pipeline,
    dataset: Dataset,
    *,
    folder: RunFolder,
    output: TextIO,
    stop: StopRequest,
) -> TrainingResult:
    """Run all steps that are left, from the newest checkpoint if there is one; every rank calls it.

    After each step, metrics are written, held-out text is evaluated, and checkpoints are saved where they are due. Rank
    0 writes to `folder` and `output`. `stop` says whether the run was asked to stop early.
    """
    begin_with_weights(config, folder, pipeline, output)
    runner = StepRunner(config, dataset, build_trainer(config, pipeline))
    early_stop = EarlyStop(config.run.patience)
    checkpoints = RunCheckpoints(config, folder, runner.trainer, early_stop, stop, data=dataset, output=output)
    progress = checkpoints.resume()
    require_separate_documents(config, pipeline, dataset.vocabulary)
    first_step = progress.step + 1
    runner.continue_recording(first_step)
    peak_bytes: Sequence[int] = ()
    write_line(output, "first step ...")
    with ExitStack() as stack:
        metrics_writer = None
        if pipeline.control.rank == 0:
            folder.write(SCHEDULE, pipeline.schedule.to_csv().encode())
            metrics_writer = MetricsWriter(
                stack,
                folder.path,
                config.metrics,
                num_steps=config.run.steps,
                output=output,
                first_step=first_step,
                utilization=utilization_of(config, dataset.vocabulary, pipeline.device),
            )
        stack.enter_context(runner.reading(first_step))
        stack.enter_context(stop.watched(2 * config.run.deadline_s))
        for step in range(first_step, config.run.steps + 1):
            metrics = runner.run_step(step) if metrics_writer is None else runner.run_step(step, metrics_writer.say)
            peak_bytes = metrics.peak_bytes or peak_bytes
            if metrics_writer is not None:
                metrics_writer.write(metrics)
            if metrics_writer is not None and runner.recorded is not None and runner.recorded.step == step:
                # The timeline is written now, so that `penstock doctor` need not wait for the run's end.
                folder.write(TIMELINE, runner.recorded.to_json().encode())
            is_last = early_stop.note(metrics.held_out_loss) or step == config.run.steps
            progress = Progress(step, metrics.outcome.loss, metrics.held_out_loss)
            checkpoints.after_step(progress, is_last=is_last)
            if is_last and step < config.run.steps:
                write_line(output, f"stopped early: {early_stop.describe()}")
                break
        checkpoints.finish(progress)
    assert progress.loss is not None, "a run has at least one step"
    return TrainingResult(
        num_steps=progress.step,
        loss=progress.loss,
        held_out_loss=progress.held_out_loss,
        timeline=runner.recorded,
        peak_bytes=peak_bytes,
        num_earlier=first_step - 1,
    )
