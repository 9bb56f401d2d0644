"""Evaluating a run: its weights, or those of a checkpoint, on its held-out text or on all of another one."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from math import exp, inf, isfinite
from pathlib import Path
from typing import TextIO

from penstock.checkpoints.folder import step_of
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.pretrained import load_weights
from penstock.checkpoints.verification import newest_readable
from penstock.errors import CheckpointError, ConfigError, NotFinite, PenstockWarning
from penstock.execute.control.collectives import Control
from penstock.execute.transport.world import default_transport
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.chat_template import require_chat_template
from penstock.train.data.dataset import TokenDataset, whole_text
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.data.user_data import Dataset
from penstock.train.folder.run_folder import RunFolder, run_path
from penstock.train.loop import PREPARING_DEADLINE_S
from penstock.train.measuring.split import choose_split
from penstock.train.model_source import build_layers
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.setup import build_pipeline, check_together, prepare_together
from penstock.train.step import mean_loss
from penstock.train.together import same_words

MAX_EXPONENT = 700.0
"""The largest loss whose exponential a float holds, nearly."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation, on every rank alike but for `rank`."""

    rank: int
    weights: Path
    """The file or checkpoint that the weights came from."""
    step: int | None
    """The step of the checkpoint; None for weights without a step."""
    loss: float
    """Mean loss over the targets; in nats per token, unless the loss is the user's own."""
    perplexity: float | None
    """The exponential of the loss; None where the loss is the user's own."""
    num_batches: int
    num_targets: int


def checkpoint_of(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step. Raises: CheckpointError, with the steps that a run has."""
    checkpoints = RunFolder(folder).checkpoints
    steps = checkpoints.steps()
    if step not in steps:
        available = f"it has {', '.join(map(str, reversed(steps)))}" if steps else "it has no checkpoint"
        raise CheckpointError(f"{folder}: has no checkpoint of step {step}; {available}")
    return checkpoints.of_step(step)


def evaluate_run(config: RunConfig, output: TextIO, *, is_whole: bool) -> Evaluation:
    """Evaluate the weights that `checkpoint.load` names as one of the ranks of a run.

    `is_whole` takes all that is not held out of the text, every sequence once; otherwise `run.evaluate_batches` batches
    of the held-out part, as the run did. No file of the run changes, but for a cache of tokens. Lines on what is under
    way go to `output`. torch.distributed is initialized where there are several ranks.

    Raises:
        CheckpointError: there are no weights, or they are of another model.
        ConfigError: the held-out part is empty, or the run was trained on another text than is there now.
        NotFinite: the loss is not finite.
        PenstockError: as when the run is trained.
    """
    folder = RunFolder(run_path(config.run.folder))
    with closing(default_transport(None, PREPARING_DEADLINE_S)) as transport:
        check_together(config, transport, tokenizer_of, require_chat_template)
        dataset = prepare_together(config, folder, transport, output, may_be_small=is_whole)
        if not is_whole:
            Control(transport).on_rank_0(lambda: _require_same_text(dataset, folder), same_words)
        layers = build_layers(config, dataset.vocabulary)
        split_rule = choose_split(config, layers, dataset, folder, transport)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)  # of training
            pipeline = build_pipeline(config, layers, split_rule, dataset.vocabulary)
    with closing(pipeline), Precision(config.precision).region(pipeline.device):
        weights_path = load_weights(Path(config.checkpoint.load), pipeline)
        batches, target_counts = _batches(config, dataset, Wants.of(pipeline), is_whole=is_whole)
        loss = mean_loss(pipeline, batches, target_counts)
    if not isfinite(loss):
        raise NotFinite(f"{weights_path}: the loss is {loss}; expected a finite number. Evaluate an earlier checkpoint")
    perplexity = None if config.model.loss else exp(loss) if loss < MAX_EXPONENT else inf
    return Evaluation(
        rank=pipeline.control.rank,
        weights=weights_path,
        step=step_of(weights_path),
        loss=loss,
        perplexity=perplexity,
        num_batches=len(target_counts),
        num_targets=int(sum(target_counts)),
    )


def _batches(
    config: RunConfig, dataset: Dataset, wants: Wants, *, is_whole: bool
) -> tuple[Iterator[Batch], Sequence[float]]:
    """Return the batches, and how many targets each has."""
    if is_whole:
        assert isinstance(dataset, TokenDataset), "a text is given"
        return whole_text(dataset, wants)
    num_batches = config.run.evaluate_batches
    batches = dataset.held_out_batches(num_batches, wants) if num_batches else []
    if not batches:
        reason = f"{config.data.source} takes no parameter `split`" if num_batches else "run.evaluate_batches is 0"
        raise ConfigError(
            f"the run holds out nothing: {reason}. Give a text with --data PATH, or --set run.evaluate_batches=16",
            key="run.evaluate_batches",
        )
    equal_counts = [float(dataset.num_targets(0))] * len(batches)
    return chain(batches), dataset.held_out_weights(num_batches) or equal_counts


def _require_same_text(dataset: Dataset, folder: RunFolder) -> None:
    """Refuse a text that is not the one of the checkpoints: its held-out part may have been trained on."""
    checkpoint = None
    with suppress(CheckpointError):
        checkpoint = newest_readable(folder.checkpoints.path)
    digest = None if checkpoint is None else read_manifest(checkpoint).extra.get("data")
    if digest not in (None, dataset.digest):
        raise ConfigError(
            "the text has changed since the run was trained, so that its held-out part may have been trained on. Put "
            "the files back, or give another text with --data PATH",
            key="data.files",
        )
