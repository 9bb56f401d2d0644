"""The diagnosis of a recorded step: where its time went, and what would take less."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.schedules import is_family_name
from penstock.searching.what_if import Change, MeasuredRun, Setting, what_if
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.blocks import Block, blocks_of
from penstock.simulation.causes import IdleTimes, idle_times
from penstock.simulation.costs.costs import Spread
from penstock.simulation.costs.fit import HALVES, SplitShares, costs_from_timelines
from penstock.simulation.costs.variation import largest_variation
from penstock.simulation.losses import Loss, losses_of
from penstock.simulation.message_latency import with_true_arrivals
from penstock.simulation.prologue import begin_of, idle_before
from penstock.train.settings.config import RunConfig
from penstock.train.watching.against_plan import AgainstPlan


@dataclass(frozen=True, slots=True)
class ReplicaWaits:
    """The cost of waiting for replicas in a recorded step, each of the rank that waited longest.

    rank 0   F0 F1 ~~~~ F2 B0 B1 B2 ######          ~ waits for the weights that its replicas gather
    rank 1   .. F0 F1 F2 B0 B1 B2 ####.             # waits for the sum of gradients over its replicas
    """

    within_s: float
    """Seconds of waits between computations, of the rank with the most."""
    within_rank: int
    behind_s: float
    """Seconds of waits after the last computation of all ranks: by so much the step is longer."""
    behind_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """Everything that is reported of a recorded step."""

    recorded: Timeline
    timeline: Timeline
    """The recorded step, but that messages arrive when they did and not when they were noticed."""
    predicted: Timeline
    idle: IdleTimes
    """Idle seconds by cause, from when each rank was free for the step to its end."""
    losses: list[Loss]
    changes: list[Change]
    spreads: tuple[Spread, ...]
    """How much equal computations of the step differ."""
    knows_shares: bool
    """Whether a profile has measured the seconds of dgrad and wgrad."""
    knows_bytes: bool
    """Whether a profile has measured the bytes of each layer's activations."""
    replicas: ReplicaWaits | None = None
    """Waits for other replicas; None where there is one replica."""
    plan: AgainstPlan | None = None
    """The run beside the plan that it was started with; None where there was none."""

    @property
    def step_s(self) -> float:
        """Seconds from when the first rank was free for the step to the end of the last computation."""
        rows = self.timeline.program.is_compute
        return float(self.timeline.end_s[rows].max()) - begin_of(self.timeline, self.recorded.prologues)

    @property
    def is_busy(self) -> bool:
        """Whether equal computations differ so much that something else ran on the machine."""
        variation = largest_variation(self.spreads)
        return variation is not None and variation.is_busy


def diagnose(
    recorded: Timeline,
    setting: Setting,
    *,
    profiled: Costs | LayerCosts | None = None,
    memory_limit: int | Sequence[int] | None = None,
) -> Diagnosis:
    """Return where the time of a recorded step went, and which changes of schedule or split would make it shorter.

    `recorded` is the measured timeline; `setting` is how the run was set up (batch size, family, options). Changes are
    simulated only if the timeline says which layers each stage has. `memory_limit` is a number of activations, for
    all ranks or one per rank.

    `profiled` are costs of the same model that a profile has measured; `LayerCosts` are per layer. Without them, dgrad
    and wgrad are taken to be half of a backward each. Without `LayerCosts`, the seconds of a stage are shared among its
    layers by their weights, and all activations are taken to be of one size.
    """
    shares = None if profiled is None else SplitShares.of(profiled, recorded.layers_of_stage)
    # The record shows when a rank noticed a message; `timeline` has the times at which messages can have arrived.
    timeline = with_true_arrivals(recorded)
    costs = costs_from_timelines([timeline], message_bytes=recorded.message_bytes, shares=shares or HALVES)
    run = _measured_run(recorded, timeline.program.actions(), costs, profiled)
    # The prologue is what a rank does before its first instruction: it gets its batch and agrees on it with all ranks.
    idle_in_prologue = idle_before(timeline, recorded.prologues)
    idle_in_step = idle_times(timeline, costs, memory_limit=memory_limit)
    return Diagnosis(
        recorded=recorded,
        timeline=timeline,
        predicted=simulate(timeline.program, costs),
        idle=IdleTimes(idle_in_prologue.by_rank + idle_in_step.by_rank),
        losses=losses_of(timeline, costs, recorded.prologues),
        changes=what_if(run, setting) if run.layers_of_stage else [],
        spreads=costs.spreads,
        knows_shares=shares is not None,
        knows_bytes=bool(run.activation_bytes),
        replicas=replica_waits(timeline) if recorded.num_replicas > 1 else None,
    )


def _measured_run(
    recorded: Timeline, schedule: Schedule, costs: Costs, profiled: Costs | LayerCosts | None
) -> MeasuredRun:
    """Return the plan that ran, with the seconds and bytes of each layer if `profiled` has as many layers.

    By a profile's seconds, else the weights, forwards and backwards of a stage are shared among its layers.
    """
    early_shares = {stage: early_weight.share for stage, early_weight in recorded.early_weights.items()}
    run = MeasuredRun(schedule, costs, recorded.layers_of_stage, recorded.layer_weights, early_shares)
    if not isinstance(profiled, LayerCosts) or profiled.num_layers != len(run.layer_weights):
        return run
    forwards, backwards = map(tuple, profiled.seconds_of_layers.tolist())
    run = replace(run, layer_weights=forwards, backward_weights=backwards)
    if not any(profiled.activation_bytes):
        return run
    return replace(run, activation_bytes=profiled.activation_bytes, weight_context_bytes=profiled.weight_context_bytes)


def setting_of(config: RunConfig) -> Setting:
    """Return the settings of a run that changes of its plan are compared with."""
    pipeline = config.pipeline
    return Setting(
        batch_size=config.batch.size // config.parallel.data,
        family=pipeline.schedule if is_family_name(pipeline.schedule) else None,
        options=pipeline.options,
        stages_per_rank=pipeline.stages_per_rank or None,
        sets_microbatch_size=pipeline.microbatch_size > 0,
    )


def replica_waits(timeline: Timeline) -> ReplicaWaits:
    """Return the longest waits for other replicas in the measured timeline of one replica."""
    within_s = [0.0] * timeline.num_ranks
    free_s = [-np.inf] * timeline.num_ranks
    for block in blocks_of(timeline):
        within_s[block.rank] += _replica_wait_s(block, free_s[block.rank])
        free_s[block.rank] = block.end_s
    program = timeline.program
    rows = program.rows_of(REDUCES_REPLICAS)
    last_s = timeline.end_s[program.is_compute].max(initial=-np.inf)
    behind_s = np.zeros(timeline.num_ranks)
    np.maximum.at(behind_s, program.rank_of_row[rows], timeline.end_s[rows] - last_s)
    within_rank, behind_rank = int(np.argmax(within_s)), int(behind_s.argmax())
    return ReplicaWaits(within_s[within_rank], within_rank, float(behind_s[behind_rank]), behind_rank)


def _replica_wait_s(block: Block, free_s: float) -> float:
    """Return the seconds before a block in which its rank waited for gathered weights, or reduced gradients.

    A gather counts from when all else was there: the rank, which is free from `free_s` on, and its messages.
    """
    reducing_s = sum(reduction.end_s - reduction.begin_s for reduction in block.reductions)
    if block.gather is None:
        return reducing_s
    ready_s = max([free_s, block.gather.begin_s, *(message.arrival_s for message in block.messages)])
    return reducing_s + max(min(block.gather.end_s, block.start_s) - ready_s, 0.0)
