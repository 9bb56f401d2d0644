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

Sort = Literal["split", "schedule", "microbatches", "weights"]
NUM_EXTREMES = 4
"""Layers are moved away from so many of the heaviest stages, and to so many of the lightest."""
MICROBATCH_FACTORS = (0.25, 0.5, 2, 4, 8)
UNIT_BYTES = 1 << 20
"""Of each layer's activation where it is not known, so that memory can be compared."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do differently, and what it is predicted to do; shares of what is predicted of the run as it is."""

    sort: Sort
    text: str
    step_change: float
    """-0.04: the step takes 4 % less."""
    memory_change: float
    """Of the activations on the fullest rank."""
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
    """Layers per stage to try as well; empty: only splits that are near."""
    family: str | None = None
    """The family that its schedule comes from; None where it is none by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the family."""
    stages_per_rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """The plan that ran, and its measured costs."""

    schedule: Schedule
    costs: Costs
    layers_of_stage: tuple[range, ...]
    layer_weights: tuple[float, ...]
    """Relative cost per layer, by which a stage's seconds are shared among its layers."""
    early_weights: Mapping[int, float] = field(default_factory=dict)
    """By stage whose backwards are split, the share of its weight gradients that I computes."""
    backward_weights: tuple[float, ...] | None = None
    """As `layer_weights`, for backwards, where these differ."""
    activation_bytes: tuple[int, ...] = ()
    """Per layer; empty where they are not known. All layers are then taken to hold as much."""
    weight_context_bytes: tuple[int, ...] = ()
    """As many as `activation_bytes` unless given."""

    def per_layer(self, costs: Costs) -> LayerCosts:
        """Share costs of its stages among their layers."""
        shared = LayerCosts.from_stages(costs, self.layers_of_stage, self.layer_weights, self.backward_weights)
        activation_bytes = self.activation_bytes or (UNIT_BYTES,) * len(self.layer_weights)
        return replace(shared, activation_bytes=activation_bytes, weight_context_bytes=self.weight_context_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Something to simulate."""

    sort: Sort
    text: str
    schedule: Schedule
    layers_of_stage: tuple[range, ...]
    settings: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """Of the weights."""
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
    found = []
    if any(run.early_weights.values()):
        waiting = run.per_layer(_all_waiting(run))
        makespan_s, _ = _predict(now, waiting, num_parts)
        found.append(Change("weights", "all weight gradients wait for W", makespan_s / now_s - 1, 0.0))
    for plan in plans:
        makespan_s, num_bytes = _predict(plan, per_layer, num_parts)
        saved = makespan_s / now_s - 1, num_bytes / now_bytes - 1
        copies_weights = plan.num_copies > now.num_copies
        found.append(Change(plan.sort, plan.text, *saved, plan.settings, copies_weights))
    return sorted(found, key=lambda change: change.step_change)


def _all_waiting(run: MeasuredRun) -> Costs:
    """The costs as they would be if no weight gradient were computed in I: half of what an I and a W take is taken to
    be weight gradients, and of these the share that was computed early moves."""
    stages = range(run.schedule.num_stages)
    inputs, weights = (run.costs.per_stage(name, len(stages)) for name in ("backward_input_s", "backward_weight_s"))
    early = np.array([run.early_weights.get(stage, 0.0) for stage in stages])
    moved = np.minimum(early * (inputs + weights) / 2, inputs)
    return replace(
        run.costs,
        backward_input_s=tuple((inputs - moved).tolist()),
        backward_weight_s=tuple((weights + moved).tolist()),
    )


def _predict(plan: _Plan, per_layer: LayerCosts, num_measured_parts: int) -> tuple[float, int]:
    """Makespan and peak bytes of a plan.

    `per_layer` are costs of one of so many equal parts of a batch, microbatches or slices.
    """
    factor = num_measured_parts / (plan.schedule.num_microbatches * plan.schedule.num_slices)
    costs = per_layer.of_stages(plan.layers_of_stage).of_share(factor)
    # Memory is compared by activations alone, as if messages were nothing.
    kept, context = costs.activation_bytes, costs.weight_context_bytes
    sizes = StageBytes.of(len(kept), activation=kept, weight_context=context)
    timeline = simulate(lower(plan.schedule), costs)
    return timeline.makespan_s, max(peak_bytes(timeline.program, sizes))


def _other_splits(now: _Plan, per_layer: LayerCosts, asked: tuple[int, ...]) -> Iterator[_Plan]:
    """The asked one, one layer moved across a boundary of two stages, and the one that measured seconds make even."""
    route = now.schedule.placement.routes[0]
    sizes = _sizes(now.schedule, now.layers_of_stage)
    tried = {tuple(sizes)}
    layers_s = per_layer.seconds_of_layers.sum(axis=0).tolist()
    stages_s = [sum(layers_s[layer] for layer in now.layers_of_stage[stage]) for stage in route]
    if asked:
        tried.add(asked)
        yield _resplit(now, split_text(asked), list(asked))
    for source, target in _moves(sizes, stages_s):
        moved = sizes.copy()
        moved[source] -= 1
        moved[target] += 1
        if tuple(moved) == asked:
            continue
        tried.add(tuple(moved))
        yield _resplit(now, f"move one layer from stage {route[source]} to stage {route[target]}", moved)
    even = split_over(now.schedule.placement, sum(sizes), weights=layers_s)
    even_sizes = [len(even[stage]) for stage in route]
    if tuple(even_sizes) not in tried:
        yield _resplit(now, split_text(even_sizes), even_sizes)


def _moves(sizes: list[int], seconds: list[float]) -> Iterator[tuple[int, int]]:
    """Pairs (from, to) of places on the route: neighbours, of which the first is heavy or the second is light."""
    order = np.argsort(seconds).tolist()
    light, heavy = set(order[:NUM_EXTREMES]), set(order[-NUM_EXTREMES:])
    for source in range(len(sizes)):
        for target in (source - 1, source + 1):
            is_wanted = 0 <= target < len(sizes) and (source in heavy or target in light)
            if is_wanted and sizes[source] > 1 and seconds[source] > seconds[target]:
                yield source, target


def _resplit(now: _Plan, text: str, sizes: list[int]) -> _Plan:
    parts = split_over(now.schedule.placement, sum(sizes), split=sizes)
    return _Plan("split", text, now.schedule, parts, (_split_setting(sizes),))


def _split_setting(sizes: Sequence[int]) -> str:
    return f"pipeline.split=[{','.join(map(str, sizes))}]"


def _other_schedules(now: _Plan, per_layer: LayerCosts, setting: Setting) -> Iterator[_Plan]:
    """All families that can have as many ranks and microbatches; equal orders under several names count once."""
    known = [now.schedule]
    for text, found, settings in _built(now.schedule, setting):
        if found.is_forward_only or any(found == other for other in known):
            continue
        try:
            parts = layers_of_stages(per_layer, found.placement)
        except PartitionError:
            continue  # more stages than layers
        known.append(found)
        sizes = _sizes(found, parts)
        split = () if sizes == _sizes(now.schedule, now.layers_of_stage) else (_split_setting(sizes),)
        yield _Plan("schedule", text, found, parts, (*settings, *split))


def _sizes(schedule: Schedule, layers_of_stage: Sequence[range]) -> list[int]:
    """Layers per stage, along a route."""
    return [len(layers_of_stage[stage]) for stage in schedule.placement.routes[0]]


def _built(like: Schedule, setting: Setting) -> Iterator[tuple[str, Schedule, tuple[str, ...]]]:
    """Families with their default number of stages per rank, with as many as now, and with two; and their settings."""
    dropped = ["pipeline.options={}"] if setting.options else []
    dropped += ["pipeline.slices=0"] if like.num_slices > 1 else []
    for name, family in FAMILIES.items():
        default = family.default_stages_per_rank(family.read_options({}))
        for number in dict.fromkeys((default, setting.stages_per_rank or default, 2)):
            text = name if number == default else f"{name}:stages_per_rank={number}"
            try:
                found = build(name, ranks=like.num_ranks, microbatches=like.num_microbatches, stages_per_rank=number)
            except ConfigError:
                continue
            stages = [] if number == (setting.stages_per_rank or default) else [f"pipeline.stages_per_rank={number}"]
            yield text, found, (f"pipeline.schedule={name}", *stages, *dropped)


def _other_microbatches(now: _Plan, setting: Setting) -> Iterator[_Plan]:
    """The same family with fewer and more microbatches of the same batch."""
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
        settings = (f"pipeline.microbatches={int(count)}",)
        yield _Plan("microbatches", f"{int(count)} microbatches", schedule, now.layers_of_stage, settings)
