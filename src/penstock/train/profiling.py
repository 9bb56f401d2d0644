"""Profiling a run: a few of its steps are recorded, its channels and layers measured, and what they cost is written."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.execute.observing.layer_sizes import CONTEXT, OPTIMIZER, WORKSPACES, gather_sizes
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
    """This rank's number among the ranks of all replicas."""
    costs: Costs
    """Costs per stage, as they were measured."""
    layer_costs: LayerCosts
    """Costs per layer, for any split: a stage's seconds are shared out by those of its layers by themselves."""
    program: Program
    num_steps: int
    channels: tuple[Channel, ...]
    """Channels by themselves, while nothing else ran."""
    memory: tuple[RankMemory, ...] = ()
    """The bytes that each rank held during a step, without an optimizer."""
    predicted_bytes: tuple[int, ...] = ()
    """The peak bytes of each rank in that step, as the model of memory predicts them."""
    exchanges: Exchanges | None = None
    """Exchanges between replicas, while nothing else ran; None where there is one replica."""


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
        split_rule = choose_split(config, layers, dataset, folder, transport)
        times, _ = times_of_layers(config, layers, dataset, folder, transport)
        pipeline = build_pipeline(config, layers, split_rule, dataset.vocabulary)
    with closing(pipeline), Precision(config.precision).region(pipeline.device):
        return profile_pipeline(pipeline, dataset, num_steps, times, config.optimizer)


def profile_pipeline(
    pipeline: Pipeline,
    dataset: Dataset,
    num_steps: int,
    times: LayerTimes | None = None,
    optimizer: OptimizerSection = ADAMW,
) -> Profile:
    """Measure a pipeline on the first batches of a data set: seconds, bytes and messages; every rank calls it.

    `times` of the layers, each measured alone, say how a stage's seconds are shared among its layers; without them, the
    weights that layers declare do. `optimizer` decides what is kept in memory for each parameter.
    """
    batches = partial(dataset.batch, wants=replace(Wants.of(pipeline), inputs=True, target=True))
    timelines = _record(pipeline, batches, num_steps)
    # A schedule with whole backwards runs again with split ones, so that costs know input and weight gradients apart.
    is_whole = _has_whole_backwards(pipeline)
    split_timelines = _record(pipeline, batches, num_steps, split_backwards=True) if is_whole else []
    assert pipeline.recording is not None
    message_bytes = pipeline.recording.message_bytes
    # Memory, channels and exchanges are measured by themselves.
    report = _run_measured(pipeline, pipeline.memory_report, batches(0))
    pairs = channels_of(pipeline.schedule.placement)
    num_bytes = max(SMALLEST_LARGE_BYTES, *message_bytes)
    channels = measure_channels(pipeline.transport, pairs, num_bytes, pipeline.device)
    exchanges = measure_exchanges(pipeline)
    bytes_by_name = _layer_bytes(pipeline, batches(0), report, optimizer)
    # Put all measurements together, per stage and then per layer.
    costs = costs_from_timelines(
        timelines,
        message_bytes=message_bytes,
        bandwidths={(channel.sender, channel.receiver): channel.bandwidth_bytes_per_s for channel in channels},
    )
    if split_timelines:
        costs = with_parts(costs, costs_from_timelines(split_timelines))
    if exchanges is not None:
        costs = exchanges.added_to(costs)
    elif pipeline.options.is_sharded:  # a single replica shares out nothing, so its exchanges take no time
        costs = replace(costs, unshard_s=(0.0,), reduce_s=(0.0,))
    costs = replace(costs, source=f"{pipeline.program!r}, {num_steps} recorded steps")
    layer_costs = _layer_costs(pipeline, costs, bytes_by_name, times, exchanges)
    stage_bytes = _stage_bytes(pipeline, layer_costs, set(report.layer_bytes))
    return Profile(
        rank=pipeline.control.rank,
        costs=replace(costs, **stage_bytes | {"message_bytes": message_bytes}),
        layer_costs=layer_costs,
        program=pipeline.program,
        num_steps=num_steps,
        channels=tuple(channels),
        memory=report.ranks,
        predicted_bytes=report.predicted_bytes,
        exchanges=exchanges,
    )


def _layer_costs(
    pipeline: Pipeline,
    costs: Costs,
    bytes_by_name: dict[str, Any],
    times: LayerTimes | None,
    exchanges: Exchanges | None,
) -> LayerCosts:
    """Share the seconds of each stage out among its layers by `times`, else by their weights, and add their bytes.

    Where the sequence is cut, the measurements are of a slice; costs per layer are of whole microbatches.
    """
    num_slices = pipeline.schedule.num_slices
    weights = (times.forward_s, times.backward_s) if times else (pipeline.layer_weights,) * 2
    layer_costs = LayerCosts.from_stages(costs.of_share(num_slices), pipeline.layers_of_stage, *weights)
    microbatch_bytes = {name: tuple(num_slices * size for size in bytes_by_name[name]) for name in VALUE_BYTES}
    layer_costs = replace(layer_costs, source=costs.source, **bytes_by_name | microbatch_bytes)
    return layer_costs if exchanges is None else exchanges.shared_out(layer_costs, pipeline.layers_of_stage)


def _stage_bytes(pipeline: Pipeline, layer_costs: LayerCosts, names: set[str]) -> dict[str, Any]:
    """Return those of the named fields of `Costs` that are bytes per stage of one slice, summed up over its layers."""
    stage_costs = layer_costs.of_stages(pipeline.layers_of_stage).of_share(1 / pipeline.schedule.num_slices)
    return {field.name: getattr(stage_costs, field.name) for field in fields(Costs) if field.name in names}


def _record(
    pipeline: Pipeline, batches: Callable[[int], Batch], num_steps: int, *, split_backwards: bool = False
) -> list[Timeline]:
    """Record steps, after others in which the ranks agree on shapes."""
    steps = range(NUM_WARM_UP_STEPS + num_steps)
    timelines = [_run_measured(pipeline, pipeline.profile, batches(step), split_backwards) for step in steps]
    return timelines[NUM_WARM_UP_STEPS:]


def _run_measured(pipeline: Pipeline, measure: Callable[..., T], batch: Batch, split_backwards: bool = False) -> T:
    """Run a step by a method of the pipeline that measures it, drop its gradients, and return the measurement."""
    measurement = measure(*batch.args, target=batch.target, split_backwards=split_backwards, **batch.kwargs)
    drop_gradients(pipeline.parameters())
    return measurement


def _layer_bytes(pipeline: Pipeline, batch: Batch, report: MemoryReport, optimizer: OptimizerSection) -> dict[str, Any]:
    """Return the measured bytes of each layer by field of `Costs`, with contexts of wgrad and the optimizer's state."""
    # Only from the second such step on do custom functions and layers that run again leave their weights for later.
    for _ in range(2):
        split_report = _run_measured(pipeline, pipeline.memory_report, batch, _has_whole_backwards(pipeline))
    local_bytes = state_bytes(
        pipeline.stages,
        optimizer,
        has_main_weights=pipeline.options.main_gradients,
        is_sharded=pipeline.options.is_sharded,
    )
    sizes = gather_sizes(pipeline.transport, {layer: {OPTIMIZER: size} for layer, size in local_bytes.items()})
    workspaces = {  # of whole backwards and of their parts, the larger ones
        name: tuple(map(max, report.layer_bytes[name], split_report.layer_bytes[name])) for name in WORKSPACES
    }
    contexts = {CONTEXT: split_report.layer_bytes[CONTEXT]}
    return {**report.layer_bytes, **workspaces, **contexts, OPTIMIZER: sizes[OPTIMIZER]}


def state_bytes(
    stages: Sequence[Stage], options: OptimizerSection, *, has_main_weights: bool, is_sharded: bool = False
) -> dict[str, int]:
    """Return the bytes of the optimizer's state of each layer, main weights included, by the layer's number.

    They are those of an optimizer that has stepped copies of the parameters on the CPU. With `is_sharded`, they are of
    all replicas together: the shape of a sharded parameter is that of the whole one.
    """
    bytes_by_layer, counted_ids = {}, set[int]()  # a parameter that several layers share counts in the first one
    for stage in stages:
        for layer, module in enumerate(stage.layers.values(), stage.first_layer):
            params = [param for param in module.parameters() if param.requires_grad and id(param) not in counted_ids]
            counted_ids.update(map(id, params))
            tensors = params if is_sharded else map(local_part, params)
            copies = [nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype)) for tensor in tensors]
            bytes_by_layer[str(layer)] = _bytes_after_step(copies, options, has_main_weights=has_main_weights)
    return bytes_by_layer


def _bytes_after_step(params: list[nn.Parameter], options: OptimizerSection, *, has_main_weights: bool) -> int:
    """Return the bytes of tensors in an optimizer's state after a step of `params` by gradients of zero."""
    store = GradientStore(params.copy, MAIN_GRAD if has_main_weights else "grad")
    have_main(params if has_main_weights else ())
    for param in params:
        store.put(param, dense_gradient(param, store.attribute))
    named_params = [(str(number), param) for number, param in enumerate(params)]
    optimizer = build_optimizer(named_params, options, has_main_weights=has_main_weights)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _has_whole_backwards(pipeline: Pipeline) -> bool:
    """Whether the schedule runs backwards in one part, dgrad and wgrad together."""
    return len(pipeline.schedule.rows_of(IS_BACKWARD & ~IS_PART)) > 0


def with_parts(costs: Costs, parts: Costs) -> Costs:
    """Add to costs the seconds of dgrad and wgrad, and of forwards before them, which were measured in other steps."""
    return replace(
        costs,
        split_forward_s=parts.forward_s,
        backward_input_s=parts.backward_input_s,
        backward_weight_s=parts.backward_weight_s,
        spreads=costs.spreads + tuple(spread for spread in parts.spreads if IS_BACKWARD[spread.kind]),
    )
