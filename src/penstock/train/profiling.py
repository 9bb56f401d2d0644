"""Profiling a run: a few of its steps are recorded, its wires measured, and what they cost written down."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

from penstock.execute.observing.footprint import SavedBytes, parameter_bytes
from penstock.execute.observing.memory_report import RankMemory
from penstock.execute.observing.wires import WireSpeed, channels_of, measure_wires
from penstock.execute.transport.protocol import Transport
from penstock.execute.world import default_transport
from penstock.ir.action import Kind
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.pipeline import Pipeline
from penstock.simulation import Costs
from penstock.simulation.costs.fit import costs_from_timelines
from penstock.train.config import RunConfig
from penstock.train.data import Batch, TokenDataset
from penstock.train.loop import PREPARING_DEADLINE_S
from penstock.train.run_folder import RunFolder, run_path
from penstock.train.setup import build_layers, build_pipeline, check_together, prepare_together
from penstock.train.split import choose_split

NUM_WARM_UP_STEPS = 2
"""The first step agrees on shapes, and the second is the first to post receives ahead."""
SMALLEST_LARGE_BYTES = 1 << 20
"""The wires are measured with messages of this size, or the run's own if they are larger."""
SPLIT_KINDS = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
ADAM_STATES = 2
"""AdamW keeps two numbers for each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What was measured, on every rank alike but for `rank`."""

    rank: int
    costs: Costs
    program: Program
    num_steps: int
    wires: tuple[WireSpeed, ...]
    """Channels by themselves, while nothing else ran."""
    memory: tuple[RankMemory, ...] = ()
    """What each rank held during a step, without an optimizer."""


def profile_run(config: RunConfig, *, num_steps: int) -> Profile:
    """Measure a run as one of its ranks; torch.distributed is initialized where there are several.

    No weights change, and nothing is written but the tokens of the text, and what layers take if the split goes by it.

    Raises:
        ConfigError, FormatError, ScheduleError, PartitionError, PipelineError: as when it is trained.
    """
    folder = RunFolder(run_path(config.run.folder))
    with closing(default_transport(None, PREPARING_DEADLINE_S)) as wires:
        check_together(config, wires)
        dataset = prepare_together(config, folder, wires)
        layers = build_layers(config, dataset.vocabulary)
        pipeline = build_pipeline(config, layers, choose_split(config, layers, dataset, folder, wires))
    with closing(pipeline):
        return profile_pipeline(pipeline, dataset, num_steps)


def profile_pipeline(pipeline: Pipeline, dataset: TokenDataset, num_steps: int) -> Profile:
    """Measure a pipeline on the first batches of a data set; every rank calls it."""
    timelines = _record(pipeline, dataset, num_steps)
    parts = _record(pipeline, dataset, num_steps, split_backwards=True) if _runs_wholes(pipeline) else []
    assert pipeline.recording is not None
    message_bytes = pipeline.recording.message_bytes
    saved = SavedBytes(pipeline.stages)
    with saved.watching():
        _run_step(pipeline, dataset.batch(0))
    memory = _measure_memory(pipeline, dataset.batch(0))
    wires = _measure_wires(pipeline, message_bytes)
    costs = costs_from_timelines(
        timelines,
        message_bytes=message_bytes,
        bandwidths={(wire.sender, wire.receiver): wire.bandwidth_bytes_per_s for wire in wires},
    )
    if parts:
        costs = with_parts(costs, costs_from_timelines(parts))
    num_stages = pipeline.program.num_stages
    held = _per_stage(pipeline.transport, parameter_bytes(pipeline.stages), num_stages)
    kept = _per_stage(pipeline.transport, saved.largest, num_stages)
    costs = replace(
        costs,
        source=f"{pipeline.program!r}, {num_steps} recorded steps",
        activation_bytes=kept,
        weight_context_bytes=kept,  # an upper bound: no module is split in a way that would tell
        parameter_bytes=held,
        gradient_bytes=held,
        optimizer_bytes=tuple(ADAM_STATES * size for size in held),
    )
    return Profile(pipeline.rank, costs, pipeline.program, num_steps, tuple(wires), memory)


def _record(
    pipeline: Pipeline, dataset: TokenDataset, num_steps: int, *, split_backwards: bool = False
) -> list[Timeline]:
    """Record steps, after others in which the ranks agree on shapes."""
    timelines = []
    for step in range(NUM_WARM_UP_STEPS + num_steps):
        timelines.append(_run_step(pipeline, dataset.batch(step), split_backwards=split_backwards))
    return timelines[NUM_WARM_UP_STEPS:]


def _run_step(pipeline: Pipeline, batch: Batch, *, split_backwards: bool = False) -> Timeline:
    tokens, target = (part.to(pipeline.device) for part in batch)
    timeline = pipeline.profile(tokens, target=target, split_backwards=split_backwards)
    for _, parameter in pipeline.named_parameters():
        parameter.grad = None
    return timeline


def _measure_memory(pipeline: Pipeline, batch: Batch) -> tuple[RankMemory, ...]:
    tokens, target = (part.to(pipeline.device) for part in batch)
    report = pipeline.memory_report(tokens, target=target)
    for _, parameter in pipeline.named_parameters():
        parameter.grad = None
    return report.ranks


def _runs_wholes(pipeline: Pipeline) -> bool:
    return bool((pipeline.schedule.kind == Kind.BACKWARD).any())


def with_parts(costs: Costs, parts: Costs) -> Costs:
    """Add what was measured with backwards in two parts: these, and the forwards that prepare them."""
    return replace(
        costs,
        split_forward_s=parts.forward_s,
        backward_input_s=parts.backward_input_s,
        backward_weight_s=parts.backward_weight_s,
        spreads=costs.spreads + tuple(each for each in parts.spreads if each.kind in SPLIT_KINDS),
    )


def _measure_wires(pipeline: Pipeline, message_bytes: Sequence[int]) -> list[WireSpeed]:
    channels = channels_of(pipeline.schedule.placement)
    num_bytes = max(SMALLEST_LARGE_BYTES, *message_bytes)
    return measure_wires(pipeline.transport, channels, num_bytes, pipeline.device)


def _per_stage(transport: Transport, own: Mapping[int, int], num_stages: int) -> tuple[int, ...]:
    """Tell all ranks the bytes of all stages; a collective."""
    everyone = transport.all_gather_object({str(stage): size for stage, size in own.items()})
    found = {int(stage): size for sizes in cast(list[dict[str, int]], everyone) for stage, size in sizes.items()}
    return tuple(found[stage] for stage in range(num_stages))
