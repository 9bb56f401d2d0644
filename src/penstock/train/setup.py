"""From a configuration to what a run needs: its folder, its data, its pipeline, its optimizer's options."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.checkpoints.pretrained import require_weights
from penstock.errors import ConfigError, count_of
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.transports import COALESCED
from penstock.lowering import lower
from penstock.models import LayerSpec, embedding_names, saved_shapes
from penstock.models.decoder import count_target_tokens
from penstock.partition.split import split_over
from penstock.pipeline import Pipeline
from penstock.planning import count_stages_per_rank, prove_and_lower, resolve_plan
from penstock.proofs import Limit, check
from penstock.schedules import FAMILIES, is_family_name
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.file import read_costs
from penstock.train.activation_checkpoints import kinds_of_layers, with_checkpointing
from penstock.train.data.dataset import left_out_notes, open_dataset
from penstock.train.data.tokenizer import tokenizer_digest, tokenizer_of
from penstock.train.data.user_data import Dataset, UserDataset
from penstock.train.devices import device_of_rank
from penstock.train.folder.run_folder import RunFolder
from penstock.train.measuring.split import SplitRule
from penstock.train.model_source import build_layers, loss_of, pipeline_loss, source_digest
from penstock.train.optimizing.optim import check_optimizer
from penstock.train.optimizing.precision import Precision, loss_scaler
from penstock.train.settings.config import RunConfig
from penstock.train.settings.user_function import load_function
from penstock.train.step import Trainer, scale_over
from penstock.train.together import Beat, same_words, working_together
from penstock.train.watching.progress import ShareLines, write_line
from penstock.train.world import check_ranks, replicas_of, require_same_layout

SET_ELSEWHERE = ("ranks", "microbatches", "slices", "stages_per_rank")


def with_digests(config: RunConfig) -> RunConfig:
    """Return the configuration with the digests of the user's files, by which a run knows them again.

    Those that the configuration has stay. Raises: ConfigError: the files of the model cannot be read.
    """
    model, data = config.model, config.data
    model_update = {"source_digest": model.source_digest or source_digest(config)}
    data_update = {"tokenizer_digest": data.tokenizer_digest or tokenizer_digest(data.tokenizer)}
    return config.model_copy(
        update={"model": model.model_copy(update=model_update), "data": data.model_copy(update=data_update)}
    )


def check_together(config: RunConfig, transport: Transport, *more: Callable[[RunConfig], object]) -> None:
    """Check the plan before anything is read or written, and what `more` checks; every rank calls it.

    Raises:
        PenstockError: on every rank; see `check_ranks`, `require_same_layout` and `check_plan`.
    """

    def check_all() -> None:
        for check_one in (check_plan, *more):
            check_one(config)

    control = Control(transport)
    control.together(lambda: check_ranks(config, transport.num_ranks), same_words)
    require_same_layout(config, control)
    control.on_rank_0(check_all, same_words)


def prepare_together(
    config: RunConfig, folder: RunFolder, transport: Transport, output: TextIO, *, may_be_small: bool = False
) -> Dataset:
    """Open the data on every rank: rank 0 first, which tells its progress; the others then find the tokens made.

    `may_be_small` is passed to `open_dataset`. The work may take any time, as long as it goes on; a rank that is lost
    meanwhile is noticed within the run's deadline.

    Raises:
        ConfigError, PenstockError: on every rank, if any rank cannot; or if the ranks do not see the same text.
    """
    dataset: Dataset | None = None
    work = partial(_open_dataset, config, folder, output, may_be_small)
    control = Control(transport, limit_s=config.run.deadline_s)
    for turn in (transport.rank == 0, transport.rank != 0):
        dataset = working_together(control, work if turn else None) or dataset
    assert dataset is not None
    digests = Control(transport).all_gather_object(dataset.digest)
    if len(set(map(str, digests))) > 1:
        raise ConfigError(
            f"the ranks see different text: {digests}; give all of them the same files or the same source",
            key="data.files",
        )
    return dataset


def _open_dataset(config: RunConfig, folder: RunFolder, output: TextIO, may_be_small: bool, beat: Beat) -> Dataset:
    lines = ShareLines(output)

    def tell(activity: str, num_done: int, num_all: int) -> None:
        beat()
        lines.tell(activity, num_done, num_all)

    with folder.leaving_no_trace():
        dataset: Dataset
        if config.data.source:
            dataset = UserDataset(config)
        else:
            other_caches = folder.other_tokens
            dataset = open_dataset(
                config, folder.tokens, other_caches=other_caches, tell=tell, may_be_small=may_be_small
            )
            for note in left_out_notes(dataset):
                write_line(output, note)
        if config.run.evaluate_batches and not dataset.held_out_batches(1):
            write_line(output, f"note: nothing is evaluated, since {config.data.source} takes no parameter `split`")
    return dataset


def check_plan(config: RunConfig) -> None:
    """Refuse a schedule, a split, a length or weights that cannot be run, before anything is read or written.

    Raises:
        ConfigError, FormatError, ScheduleError, PartitionError: as when the pipeline is built.
        CheckpointError: there are no weights to begin with where they should be.
    """
    if config.data.source:
        load_function(config.data.source, "data.source")
    if config.checkpoint.load:
        _require_initial_weights(config)
    loss_of(config, _some_vocabulary(config))
    num_layers = len(build_layers(config, _some_vocabulary(config)))
    _require_layers(config, num_layers)
    plan = build_plan(config)
    _require_shardable(config, plan)
    _prove_plan(config, plan)
    schedule = plan.actions()
    _require_tokens(config, schedule.num_slices)
    _check_split(config, schedule, num_layers)
    check_optimizer(config.optimizer, is_sharded=config.parallel.shard != "none")


def _require_initial_weights(config: RunConfig) -> None:
    """Refuse a `checkpoint.load` without weights of the model's names and shapes. Raises: CheckpointError."""
    layers = build_layers(config, vocabulary=config.model.vocabulary or tokenizer_of(config).vocabulary)
    require_weights(Path(config.checkpoint.load), saved_shapes(layers))


def _prove_plan(config: RunConfig, plan: Schedule | Program) -> None:
    """Prove that the plan runs to its end, within a limit of activations; costs must have the sizes for one in bytes.

    Bytes depend on the split, so the pipeline proves a limit in bytes when it is made.
    """
    limit, costs, pipeline = memory_limit(config), load_costs(config), config.pipeline
    if limit is not None:
        limit.require_sizes(None if costs is None else costs.activation_bytes, "pipeline.memory_limit")
    messages = COALESCED.name if config.debug.one_stream else pipeline.messages
    if pipeline.offload:
        try:
            plan = prove_and_lower(plan, messages=messages, offload=pipeline.offload)
        except ConfigError as error:
            raise ConfigError(error.problem, key=f"pipeline.{error.key}") from error
    activations = None if limit is None or limit.in_bytes else limit
    check(plan, messages, memory_limit=activations)


def _check_split(config: RunConfig, schedule: Schedule, num_layers: int) -> None:
    """Refuse stages, or kinds of checkpointing per stage, that do not fit the layers. Raises: as `check_plan`."""
    split = config.pipeline.split
    stages = split_over(schedule.placement, num_layers, split=None if isinstance(split, str) else split)
    kinds_of_layers(config.pipeline.activation_checkpointing, stages)


def _require_shardable(config: RunConfig, plan: Schedule | Program) -> None:
    """Refuse a schedule whose stages cannot be gathered as the settings say. Raises: ConfigError."""
    sharding = config.parallel.sharding
    # A program gathers by itself; the pipeline looks at it.
    if not sharding.passes or isinstance(plan, Program):
        return
    try:
        lower(plan, **asdict(sharding))
    except ConfigError as error:
        raise ConfigError(error.problem, key=f"parallel.{error.key}") from error


def memory_limit(config: RunConfig) -> Limit | None:
    """Return the limit that the configuration sets. Raises: ConfigError."""
    limit = config.pipeline.memory_limit
    return None if limit == "" else Limit.read(limit, "pipeline.memory_limit")


def load_costs(config: RunConfig) -> Costs | LayerCosts | None:
    """Read the file of costs that the configuration names. Raises: ConfigError, FormatError."""
    return read_costs(Path(config.pipeline.costs)) if config.pipeline.costs else None


def _require_layers(config: RunConfig, num_layers: int) -> None:
    """Refuse numbers of ranks and stages that so few layers cannot fill, before a schedule of that size is built.

    A family has at most two copies of the model, so at least half of a rank's stages belong to one copy and need
    different layers. `split_over` checks the exact number later. Raises: ConfigError.
    """
    pipeline = config.pipeline
    fewest = pipeline.ranks * max((pipeline.stages_per_rank + 1) // 2, 1)
    if pipeline.schedule in FAMILIES and fewest > num_layers:
        stages = f" of {pipeline.stages_per_rank} stages" if pipeline.stages_per_rank else ""
        source, blocks = config.model.place, config.model.layers
        layer_origin = f"those of {source}" if source else f"{blocks} blocks, the embedding, the norm and the head"
        more = "take a model of more layers" if source else "raise model.layers"
        raise ConfigError(
            f"{count_of(pipeline.ranks, 'rank')}{stages} need at least {fewest} layers, but the model has {num_layers} "
            f"({layer_origin}). Use at most {num_layers} ranks, or {more}",
            key="pipeline.ranks",
        )


def _require_tokens(config: RunConfig, num_slices: int) -> None:
    """Refuse sequences that so many slices do not divide. Raises: ConfigError."""
    length = config.batch.length
    if length < num_slices:
        raise ConfigError(
            f"{length} tokens cannot fill {num_slices} slices; use at least one token per slice", key="batch.length"
        )
    if length % num_slices and not config.batch.allow_ragged:
        shorter = length - length % num_slices
        raise ConfigError(
            f"{length} is not a multiple of the schedule's {num_slices} slices; use {shorter} or "
            f"{shorter + num_slices}, or set batch.allow_ragged = true",
            key="batch.length",
        )


def build_plan(config: RunConfig) -> Schedule | Program:
    """Return the schedule that the configuration names, or the program, which is a schedule with its communication.

    Raises:
        ConfigError, FormatError: an unknown name, option or file; a schedule for other numbers, or without backwards.
    """
    pipeline = config.pipeline
    for name in SET_ELSEWHERE:
        if name in pipeline.options:
            raise ConfigError(f"not an option of a schedule; set pipeline.{name}", key=f"pipeline.options.{name}")
    slices = {"slices": pipeline.slices} if pipeline.slices and is_family_name(pipeline.schedule) else {}
    try:
        stages_per_rank = pipeline.stages_per_rank or None
        if pipeline.layers_per_stage:
            num_layers = len(build_layers(config, _some_vocabulary(config)))
            stages_per_rank = count_stages_per_rank(
                pipeline.schedule, num_layers, pipeline.layers_per_stage, pipeline.ranks
            )
        plan = resolve_plan(
            pipeline.schedule,
            ranks=pipeline.ranks,
            microbatches=pipeline.microbatches,
            stages_per_rank=stages_per_rank,
            options=pipeline.options | slices,
        )
    except ConfigError as error:
        # The planner knows the setting as `warmup`, the file as `pipeline.options.warmup`.
        section, problem = "pipeline.options" if error.key in pipeline.options else "pipeline", error.problem
        if error.key == "microbatches" and pipeline.microbatch_size:
            problem += f". pipeline.microbatch_size = {pipeline.microbatch_size} makes {pipeline.microbatches} of them"
        raise ConfigError(problem, key=f"{section}.{error.key or 'schedule'}") from error
    if pipeline.slices not in (0, plan.num_slices):
        raise ConfigError(
            f"{pipeline.slices}, but {plan.name} is for {plan.num_slices} slices; make them equal",
            key="pipeline.slices",
        )
    if plan.actions().is_forward_only:
        raise ConfigError(f"{plan.name} has no backwards, so nothing would be learned", key="pipeline.schedule")
    return plan


def build_pipeline(config: RunConfig, layers: list[LayerSpec], rule: SplitRule, vocabulary: int) -> Pipeline:
    """Build this rank's part of the model, split by the rule; every rank calls it.

    `layers` are modules or recipes that build one; `vocabulary` is the number of token ids, which the loss needs.
    """
    schedule, batch_plan = build_plan(config), config.batch_plan
    precision, device = Precision(config.precision), device_of_rank(config)
    weights = None if rule.split is not None else rule.weights or [layer.weight for layer in layers]
    stages = split_over(schedule.placement, len(layers), split=rule.split, weights=weights)
    kinds = kinds_of_layers(config.pipeline.activation_checkpointing, stages)
    # With whole documents, batches differ in their numbers of targets, so their shares in a step differ.
    is_uneven = config.data.packs.pads
    counts_targets = is_uneven or config.data.source
    # A scaler can change the share from batch to batch; a constant factor will do where all shares are equal.
    needs_scaler = precision.scales_losses or not batch_plan.is_constant or (is_uneven and batch_plan.full > 1)
    return Pipeline(
        with_checkpointing(layers, kinds),
        schedule=schedule,
        loss=pipeline_loss(config, vocabulary),
        count=count_target_tokens if counts_targets else None,
        scale_loss=loss_scaler(precision, device).scale_mean if needs_scaler else scale_over(batch_plan.full),
        main_gradients=precision.has_main_weights,
        device=device,
        split=rule.split,
        weights=rule.weights,
        allow_ragged=config.batch.allow_ragged,
        deadline_s=config.run.deadline_s,
        debug=config.debug.level,
        ranges=config.debug.ranges or bool(config.profile.steps),
        memory_limit=memory_limit(config),
        costs=load_costs(config),
        run_ahead=config.pipeline.run_ahead or None,
        compile=config.pipeline.compile,
        messages=config.pipeline.messages,
        offload=config.pipeline.offload,
        one_stream=config.debug.one_stream,
        # Random numbers of layers, too, are the same on any number of ranks and replicas. The decoder draws nothing.
        seed=config.run.seed if config.model.place else None,
        **replicas_of(config, device),
    )


def _some_vocabulary(config: RunConfig) -> int:
    """Return a vocabulary for layers that are not trained, so that the tokenizer need not be read for them."""
    return config.model.vocabulary or (1 if config.model.transformers else 256)


def build_trainer(config: RunConfig, pipeline: Pipeline) -> Trainer:
    """Build the optimizer of this rank's part; every rank calls it."""
    # Only names count, so any vocabulary will do.
    layers = [] if config.optimizer.decay_embeddings else build_layers(config, _some_vocabulary(config))
    embeddings = embedding_names(layers)
    precision, num_steps = Precision(config.precision), config.run.steps
    return Trainer(
        pipeline,
        config.optimizer,
        num_steps=num_steps,
        precision=precision,
        embeddings=embeddings,
        norms=config.debug.norms,
    )
