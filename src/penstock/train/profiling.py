"""Profiling a run: a few of its steps are recorded, its channels and layers measured, and what they cost is written."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.execute.observing.layer_sizes import CONTEXT, OPTIMIZER, gather_sizes
from penstock.execute.observing.memory_report import MemoryReport
from penstock.execute.observing.rank_memory import RankMemory
from penstock.execute.parameters.gradient_store import (
    MAIN_GRAD,
    GradientStore,
    dense_gradient,
    drop_gradients,
    have_main,
)
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.world import default_transport
from penstock.execute.values.tensors import local_part
from penstock.ir.operations import IS_BACKWARD
from penstock.ir.program import Program
from penstock.ir.table import IS_PART
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import VALUE_BYTES, Channel
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.user_data import Dataset
from penstock.train.folder.run_folder import RunFolder, run_path
from penstock.train.loop import PREPARING_DEADLINE_S
from penstock.train.measuring.exchanges import Exchanges, channels_of, measure_channels, measure_exchanges
from penstock.train.measuring.measure import LayerTimes
from penstock.train.measuring.split import choose_split, times_of_layers
from penstock.train.model_source import build_layers
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.settings.sections import OptimizerSection
from penstock.train.setup import build_pipeline, check_together, prepare_together

T = TypeVar("T")
NUM_WARM_UP_STEPS = 2
"""The first step agrees on shapes, and the second is the first to post receives ahead."""
SMALLEST_LARGE_BYTES = 1 << 20
"""Channels are measured with messages of this size, or the run's own if they are larger."""
ADAMW = OptimizerSection()


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The measurements, on every rank of a replica alike but for `rank`; seconds of replicas differ a little."""

    rank: int
    """Among those of all replicas."""
    costs: Costs
    """Per stage, as it was measured."""
    layer_costs: LayerCosts
    """Of any split: what stages took is shared by what their layers take by themselves."""
    program: Program
    num_steps: int
    channels: tuple[Channel, ...]
    """Channels by themselves, while nothing else ran."""
    memory: tuple[RankMemory, ...] = ()
    """The bytes that each rank held during a step, without an optimizer."""
    predicted_bytes: tuple[int, ...] = ()
    """Per rank, the peak of that step as the model of memory has it."""
    exchanges: Exchanges | None = None
    """Between replicas, by themselves; None where there is one."""


def profile_run(config: RunConfig, *, num_steps: int) -> Profile:
    """Measure a run as one of its ranks; torch.distributed is initialized where there are several.

    No weights change, and nothing is written but the tokens of the text, and what layers take if the split needs it.

    Raises:
        ConfigError, FormatError, ScheduleError, PartitionError, PipelineError: as when it is trained.
    """
    folder = RunFolder(run_path(config.run.folder))
    with closing(default_transport(None, PREPARING_DEADLINE_S)) as transport:
        check_together(config, transport)
        dataset = prepare_together(config, folder, transport, sys.stderr)
        layers = build_layers(config, dataset.vocabulary)
        split = choose_split(config, layers, dataset, folder, transport)
        times, _ = times_of_layers(config, layers, dataset, folder, transport)
        pipeline = build_pipeline(config, layers, split, dataset.vocabulary)
    with closing(pipeline), Precision(config.precision).region(pipeline.device):
        return profile_pipeline(pipeline, dataset, num_steps, times, config.optimizer)


def profile_pipeline(
    pipeline: Pipeline,
    dataset: Dataset,
    num_steps: int,
    times: LayerTimes | None = None,
    optimizer: OptimizerSection = ADAMW,
) -> Profile:
    """Measure a pipeline on the first batches of a data set; every rank calls it.

    `times` of the layers by themselves say what each takes of its stage; without them, the weights that layers declare.
    `optimizer` decides what is kept of each parameter.
    """
    wants = replace(Wants.of(pipeline), inputs=True, target=True)
    batches = partial(dataset.batch, wants=wants)
    timelines = _record(pipeline, batches, num_steps)
    parts = _record(pipeline, batches, num_steps, split_backwards=True) if _runs_wholes(pipeline) else []
    assert pipeline.recording is not None
    message_bytes = pipeline.recording.message_bytes
    report = _measured(pipeline, pipeline.memory_report, batches(0))
    pairs = channels_of(pipeline.schedule.placement)
    num_bytes = max(SMALLEST_LARGE_BYTES, *message_bytes)
    channels = measure_channels(pipeline.transport, pairs, num_bytes, pipeline.device)
    exchanges = measure_exchanges(pipeline)
    costs = costs_from_timelines(
        timelines,
        message_bytes=message_bytes,
        bandwidths={(channel.sender, channel.receiver): channel.bandwidth_bytes_per_s for channel in channels},
    )
    if parts:
        costs = with_parts(costs, costs_from_timelines(parts))
    if exchanges is not None:
        costs = exchanges.added_to(costs)
    elif pipeline.options.is_sharded:  # with itself alone
        costs = replace(costs, unshard_s=(0.0,), reduce_s=(0.0,))
    source = f"{pipeline.program!r}, {num_steps} recorded steps"
    shared = (times.forward_s, times.backward_s) if times else (pipeline.layer_weights,) * 2
    # The measurements are of a slice, where the sequence is cut; costs per layer are of whole microbatches.
    num_slices = pipeline.schedule.num_slices
    per_layer = LayerCosts.from_stages(costs.of_share(num_slices), pipeline.layers_of_stage, *shared)
    sizes = _layer_bytes(pipeline, batches(0), report, optimizer)
    whole = {name: tuple(num_slices * each for each in sizes[name]) for name in VALUE_BYTES}
    per_layer = replace(per_layer, source=source, **sizes | whole)
    if exchanges is not None:
        per_layer = exchanges.shared_out(per_layer, pipeline.layers_of_stage)
    held = per_layer.of_stages(pipeline.layers_of_stage).of_share(1 / num_slices)
    names = {each.name for each in fields(Costs)} & set(report.layer_bytes)
    of_stages = {name: getattr(held, name) for name in names}
    costs = replace(costs, source=source, **of_stages | {"message_bytes": message_bytes})
    return Profile(
        pipeline.control.rank,
        costs,
        per_layer,
        pipeline.program,
        num_steps,
        tuple(channels),
        report.ranks,
        report.predicted_bytes,
        exchanges,
    )


def _record(
    pipeline: Pipeline, batches: Callable[[int], Batch], num_steps: int, *, split_backwards: bool = False
) -> list[Timeline]:
    """Record steps, after others in which the ranks agree on shapes."""
    steps = range(NUM_WARM_UP_STEPS + num_steps)
    timelines = [_measured(pipeline, pipeline.profile, batches(step), split_backwards) for step in steps]
    return timelines[NUM_WARM_UP_STEPS:]


def _measured(pipeline: Pipeline, measure: Callable[..., T], batch: Batch, split_backwards: bool = False) -> T:
    """Run a step that is measured, and drop its gradients."""
    found = measure(*batch.args, target=batch.target, split_backwards=split_backwards, **batch.kwargs)
    drop_gradients(pipeline.parameters())
    return found


def _layer_bytes(pipeline: Pipeline, batch: Batch, report: MemoryReport, optimizer: OptimizerSection) -> dict[str, Any]:
    """Return the measured bytes of each layer, with the contexts of split backwards and the state of an optimizer."""
    # Only from the second such step on do custom functions and layers that run again leave their weights for later.
    for _ in range(2):
        split = _measured(pipeline, pipeline.memory_report, batch, _runs_wholes(pipeline))
    has_main_weights = pipeline.options.main_gradients
    found = state_bytes(
        pipeline.stages, optimizer, has_main_weights=has_main_weights, is_sharded=pipeline.options.is_sharded
    )
    state = {layer: {OPTIMIZER: size} for layer, size in found.items()}
    gathered = gather_sizes(pipeline.transport, state)
    return {**report.layer_bytes, CONTEXT: split.layer_bytes[CONTEXT], OPTIMIZER: gathered[OPTIMIZER]}


def state_bytes(
    stages: Sequence[Stage], options: OptimizerSection, *, has_main_weights: bool, is_sharded: bool = False
) -> dict[str, int]:
    """Return what the optimizer keeps of each layer, main weights included, seen from copies on the CPU.

    With `is_sharded`, what all replicas keep of it together.
    """
    found, seen = {}, set[int]()
    for stage in stages:
        for layer, module in enumerate(stage.layers.values(), stage.first_layer):
            own = [each for each in module.parameters() if each.requires_grad and id(each) not in seen]
            seen.update(map(id, own))
            parts = [each.shape if is_sharded else local_part(each).shape for each in own]
            copies = [
                nn.Parameter(torch.zeros(shape, dtype=each.dtype)) for shape, each in zip(parts, own, strict=True)
            ]
            store = GradientStore(copies.copy, MAIN_GRAD if has_main_weights else "grad")
            have_main(copies if has_main_weights else ())
            for copy in copies:
                store.put(copy, dense_gradient(copy, store.attribute))
            named = [(str(number), copy) for number, copy in enumerate(copies)]
            optimizer = build_optimizer(named, options, has_main_weights=has_main_weights)
            optimizer.step()
            kept = [part for state in optimizer.state.values() for part in state.values()]
            found[str(layer)] = sum(part.nbytes for part in kept if isinstance(part, Tensor))
    return found


def _runs_wholes(pipeline: Pipeline) -> bool:
    return len(pipeline.schedule.rows_of(IS_BACKWARD & ~IS_PART)) > 0


def with_parts(costs: Costs, parts: Costs) -> Costs:
    """Add what was measured with backwards in two parts: these, and the forwards that prepare them."""
    return replace(
        costs,
        split_forward_s=parts.forward_s,
        backward_input_s=parts.backward_input_s,
        backward_weight_s=parts.backward_weight_s,
        spreads=costs.spreads + tuple(each for each in parts.spreads if IS_BACKWARD[each.kind]),
    )
