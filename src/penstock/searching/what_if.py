"""Other plans for a measured run: another split, another schedule, other microbatches, each simulated.

A stage's measured seconds are shared among its layers by their weights, so that any split can be put together; those of
a smaller microbatch are assumed to be in proportion to its size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError, PartitionError
from penstock.ir.live import StageBytes, peak_bytes
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.partition.split import split_over, split_text
from penstock.planning import layers_of_stages
from penstock.schedules import FAMILIES, build
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.layer_costs import split_sizes

Sort = Literal["split", "schedule", "microbatches", "weights"]
NUM_EXTREMES = 4
"""Layers are moved away from so many of the heaviest stages, and to so many of the lightest."""
MICROBATCH_FACTORS = (0.25, 0.5, 2, 4, 8)
UNIT_BYTES = 1 << 20
"""The bytes of each layer's activation where they are not known, so that memory can be compared."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do differently, and what it is predicted to change, in shares of the run as it is predicted now."""

    sort: Sort
    text: str
    step_change: float
    """The change of the step's seconds: with -0.04 the step takes 4 % less."""
    memory_change: float
    """The change of the bytes of activations on the fullest rank."""
    settings: tuple[str, ...] = ()
    """Keys and values for --set of `penstock train`; empty where no key does it."""
    copies_weights: bool = False
    """Whether each rank then holds a second copy of weights, gradients and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a run is set up now, apart from what was measured."""

    batch_size: int | None = None
    """Sequences per pipeline step; None where it is not known, so that no other microbatches are tried."""
    split: tuple[int, ...] = ()
    """The layers per stage of a split to try as well; where it is empty, only near splits are tried."""
    family: str | None = None
    """The name of the family that the schedule comes from; None where it comes from no family."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the family."""
    stages_per_rank: int | None = None
    sets_microbatch_size: bool = False
    """Whether the run file sets the size of a microbatch in place of their number."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """The plan that ran, and its measured costs."""

    schedule: Schedule
    costs: Costs
    layers_of_stage: tuple[range, ...]
    layer_weights: tuple[float, ...]
    """Relative cost per layer, by which a stage's seconds are shared among its layers."""
    early_weights: Mapping[int, float] = field(default_factory=dict)
    """The share of weight gradients that I computes, for each stage whose backwards are split."""
    backward_weights: tuple[float, ...] | None = None
    """Relative cost of the backwards per layer, where they differ from `layer_weights`."""
    activation_bytes: tuple[int, ...] = ()
    """Bytes per layer; empty where they are not known. All layers are then taken to hold as much."""
    weight_context_bytes: tuple[int, ...] = ()
    """Bytes per layer that stay for W; as many as `activation_bytes` where it is empty."""

    def per_layer(self, costs: Costs) -> LayerCosts:
        """Return costs of the run's stages, shared among their layers."""
        shared = LayerCosts.from_stages(costs, self.layers_of_stage, self.layer_weights, self.backward_weights)
        activation_bytes = self.activation_bytes or (UNIT_BYTES,) * len(self.layer_weights)
        return replace(shared, activation_bytes=activation_bytes, weight_context_bytes=self.weight_context_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A schedule with a split of layers, to be simulated, and how a user gets it."""

    sort: Sort
    text: str
    schedule: Schedule
    layers_of_stage: tuple[range, ...]
    settings: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """The number of copies of the weights."""
        return len(self.schedule.placement.routes)


def what_if(run: MeasuredRun, setting: Setting) -> list[Change]:
    """Simulate every change of one thing, and return what each does, the most helpful first."""
    per_layer = run.per_layer(run.costs)
    now = _Plan("schedule", run.schedule.name, run.schedule, run.layers_of_stage)
    num_parts = run.schedule.num_microbatches * run.schedule.num_slices
    now_s, now_bytes = _predict(now, per_layer, num_parts)
    if not now_s:
        return []  # nothing to save
    plans = [
        *_other_splits(now, per_layer, setting.split),
        *_other_schedules(now, per_layer, setting),
        *_other_microbatches(now, setting),
    ]
    changes = []
    if any(run.early_weights.values()):
        makespan_s, _ = _predict(now, run.per_layer(_without_early_weights(run)), num_parts)
        changes.append(Change("weights", "all weight gradients wait for W", makespan_s / now_s - 1, 0.0))
    for plan in plans:
        makespan_s, num_bytes = _predict(plan, per_layer, num_parts)
        step_change, memory_change = makespan_s / now_s - 1, num_bytes / now_bytes - 1
        copies_weights = plan.num_copies > now.num_copies
        changes.append(Change(plan.sort, plan.text, step_change, memory_change, plan.settings, copies_weights))
    return sorted(changes, key=lambda change: change.step_change)


def _without_early_weights(run: MeasuredRun) -> Costs:
    """Return the costs as they would be if no weight gradient were computed in I.

    Half of what an I and a W take is taken to be weight gradients; of these, the share that was computed early moves.
    """
    stages = range(run.schedule.num_stages)
    inputs, weights = (run.costs.per_stage(name, len(stages)) for name in ("backward_input_s", "backward_weight_s"))
    early_shares = np.array([run.early_weights.get(stage, 0.0) for stage in stages])
    early_s = np.minimum(early_shares * (inputs + weights) / 2, inputs)
    inputs_s, weights_s = (tuple(seconds.tolist()) for seconds in (inputs - early_s, weights + early_s))
    return replace(run.costs, backward_input_s=inputs_s, backward_weight_s=weights_s)


def _predict(plan: _Plan, per_layer: LayerCosts, num_measured_parts: int) -> tuple[float, int]:
    """Return the makespan of a plan, and the most bytes of activations of a rank.

    `per_layer` are costs of one of so many equal parts of a batch, microbatches or slices.
    """
    factor = num_measured_parts / (plan.schedule.num_microbatches * plan.schedule.num_slices)
    costs = per_layer.of_stages(plan.layers_of_stage).of_share(factor)
    # Memory is compared by activations alone, as if messages were nothing.
    activation, context = costs.activation_bytes, costs.weight_context_bytes
    sizes = StageBytes.of(len(activation), activation=activation, weight_context=context)
    timeline = simulate(lower(plan.schedule), costs)
    return timeline.makespan_s, max(peak_bytes(timeline.program, sizes))


def _other_splits(now: _Plan, per_layer: LayerCosts, user_split: tuple[int, ...]) -> Iterator[_Plan]:
    """Yield the user's split, those with one layer moved to the next stage, and the one that makes seconds even."""
    route = now.schedule.placement.routes[0]
    sizes = split_sizes(now.layers_of_stage)
    tried = {sizes}
    layers_s = per_layer.seconds_of_layers.sum(axis=0).tolist()
    stages_s = [sum(layers_s[layer] for layer in now.layers_of_stage[stage]) for stage in route]
    if user_split:
        tried.add(user_split)
        yield _resplit(now, split_text(user_split), user_split)
    for source, target in _moves(sizes, stages_s):
        near_sizes = list(sizes)
        near_sizes[source] -= 1
        near_sizes[target] += 1
        if tuple(near_sizes) == user_split:
            continue
        tried.add(tuple(near_sizes))
        yield _resplit(now, f"move one layer from stage {route[source]} to stage {route[target]}", near_sizes)
    even_sizes = split_sizes(split_over(now.schedule.placement, sum(sizes), weights=layers_s))
    if even_sizes not in tried:
        yield _resplit(now, split_text(even_sizes), even_sizes)


def _moves(sizes: Sequence[int], seconds: list[float]) -> Iterator[tuple[int, int]]:
    """Yield pairs (from, to) of neighbours on the route, of which the first is heavy or the second is light."""
    order = np.argsort(seconds).tolist()
    light, heavy = set(order[:NUM_EXTREMES]), set(order[-NUM_EXTREMES:])
    for source in range(len(sizes)):
        for target in (source - 1, source + 1):
            is_promising = 0 <= target < len(sizes) and (source in heavy or target in light)
            if is_promising and sizes[source] > 1 and seconds[source] > seconds[target]:
                yield source, target


def _resplit(now: _Plan, text: str, sizes: Sequence[int]) -> _Plan:
    parts = split_over(now.schedule.placement, sum(sizes), split=sizes)
    return _Plan("split", text, now.schedule, parts, (_split_setting(sizes),))


def _split_setting(sizes: Sequence[int]) -> str:
    return f"pipeline.split=[{','.join(map(str, sizes))}]"


def _other_schedules(now: _Plan, per_layer: LayerCosts, setting: Setting) -> Iterator[_Plan]:
    """Yield all families that can have as many ranks and microbatches; equal orders under several names count once."""
    schedules = [now.schedule]
    for text, schedule, settings in _built(now.schedule, setting):
        if schedule.is_forward_only or schedule in schedules:
            continue
        try:
            parts = layers_of_stages(per_layer, schedule.placement)
        except PartitionError:
            continue  # more stages than layers
        schedules.append(schedule)
        sizes = split_sizes(parts)
        split = () if sizes == split_sizes(now.layers_of_stage) else (_split_setting(sizes),)
        yield _Plan("schedule", text, schedule, parts, (*settings, *split))


def _built(now: Schedule, setting: Setting) -> Iterator[tuple[str, Schedule, tuple[str, ...]]]:
    """Yield families with their default number of stages per rank, as many as now, and two; and their settings."""
    resets = ["pipeline.options={}"] if setting.options else []
    resets += ["pipeline.slices=0"] if now.num_slices > 1 else []
    for name, family in FAMILIES.items():
        default = family.default_stages_per_rank(family.read_options({}))
        for number in dict.fromkeys((default, setting.stages_per_rank or default, 2)):
            text = name if number == default else f"{name}:stages_per_rank={number}"
            try:
                schedule = build(name, ranks=now.num_ranks, microbatches=now.num_microbatches, stages_per_rank=number)
            except ConfigError:
                continue
            stages = [] if number == (setting.stages_per_rank or default) else [f"pipeline.stages_per_rank={number}"]
            yield text, schedule, (f"pipeline.schedule={name}", *stages, *resets)


def _other_microbatches(now: _Plan, setting: Setting) -> Iterator[_Plan]:
    """Yield the same family with fewer and more microbatches of the same batch."""
    if setting.family is None or setting.batch_size is None:
        return
    for factor in MICROBATCH_FACTORS:
        count = now.schedule.num_microbatches * factor
        if count < 1 or count != int(count) or setting.batch_size % int(count):
            continue
        try:
            schedule = build(
                setting.family,
                ranks=now.schedule.num_ranks,
                microbatches=int(count),
                slices=now.schedule.num_slices,
                stages_per_rank=setting.stages_per_rank,
                **setting.options,
            )
        except ConfigError:
            continue
        size = setting.batch_size // int(count)
        key, value = ("microbatch_size", size) if setting.sets_microbatch_size else ("microbatches", int(count))
        settings = (f"pipeline.{key}={value}",)
        yield _Plan("microbatches", f"{int(count)} microbatches", schedule, now.layers_of_stage, settings)
