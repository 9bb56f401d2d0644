"""Schedules side by side under the same costs: how long they take, how much they idle, hold and send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from penstock.errors import PenstockError
from penstock.ir.collectives import GATHERS
from penstock.ir.operations import IS_SEND
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.whole import peak_whole
from penstock.lowering import NONE, NOT_SHARDED, Sharding
from penstock.planning import equal_work_costs, layers_of_stages, plan
from penstock.proofs import Limit
from penstock.searching.fitting import FittingSplit, fitting_split
from penstock.searching.front import pareto_front
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.layer_costs import split_sizes
from penstock.simulation.costs.replicas import of_replicas


@dataclass(frozen=True, slots=True)
class Comparison:
    """The prediction of one schedule; fractions of time are between 0 and 1."""

    name: str
    makespan_s: float
    span_s: float
    bubble_fraction: float
    bubble_rate: float
    peak_activations: list[int]
    num_messages: int
    """How many results cross from rank to rank."""
    num_microbatches: int
    num_parts: Fraction
    """The stages and slices that a rank runs for one microbatch, in the mean."""
    peak_bytes: list[int] | None = None
    """The bytes of each rank, with what is always there; None where costs do not say how large activations are."""
    split: tuple[int, ...] | None = None
    """The layers of each stage along a route; None where costs are not per layer."""
    num_copies: int = 1
    """How many copies of the weights there are: a bidirectional placement has two."""
    step_s: float | None = None
    """The seconds of a step with what replicas exchange before and after computing; None without replicas."""
    num_gathers: int = 0
    """The gathers of all ranks together."""
    peak_whole: list[int] | None = None
    """The most stages of each rank that are whole at once; None where none is gathered."""
    exchanges_are_free: bool = True
    """Whether the costs give no seconds for gathers and reductions."""
    other_splits: FittingSplit | None = None
    """Other splits of the layers; None where the first split fits or is the user's, or no limit is in bytes."""

    def fits(self, limit: Limit) -> bool:
        """Whether no rank holds more than it may; False for bytes where these are not known."""
        peaks = self.peak_bytes if limit.in_bytes else self.peak_activations
        return peaks is not None and bool((limit.of_ranks(len(peaks), self.num_parts) >= peaks).all())

    @property
    def time_s(self) -> float:
        """The seconds by which schedules are compared."""
        return self.makespan_s if self.step_s is None else self.step_s

    @property
    def memory(self) -> Fraction | int:
        """The memory by which schedules are compared: bytes where replicas share them, else activations."""
        is_in_bytes = self.step_s is not None and self.peak_bytes is not None
        return max(self.peak_bytes or [0]) if is_in_bytes else self.peak_microbatches

    @property
    def peak_microbatches(self) -> Fraction:
        """The most that a rank holds, in units of all that one microbatch leaves on it."""
        return max(self.peak_activations) / self.num_parts


@dataclass(frozen=True, slots=True)
class Refusal:
    """A schedule that cannot have the shape that was asked for."""

    name: str
    reason: str


def compare(
    name: str,
    make: Callable[[], Schedule],
    costs: Costs | LayerCosts,
    *,
    per_action: bool = False,
    replicas: int | None = None,
    sharding: Sharding = NOT_SHARDED,
    limit: Limit | None = None,
    keeps_split: bool = False,
) -> Comparison | Refusal:
    """Make a schedule, prove it and simulate it; return the figures, or a refusal with the reason.

    `costs` that are not per layer are those of all that a rank does for one microbatch, which its stages and slices
    share: so every schedule does equal work. With `per_action` they are those of each stage and slice as they are.
    `replicas` adds the exchanges of so many copies of the pipeline, whose weights are sharded as `sharding` says.

    Where a rank would hold more bytes than the `limit`, costs per layer are split over the stages in another way: of
    the splits in which no rank holds more, the one whose heaviest stage takes least. With `keeps_split`, a split that
    has the same number of stages stays as it is.
    """
    predict = partial(_predict, name, per_action=per_action, replicas=replicas, sharding=sharding)
    try:
        schedule = make()
        row, program = predict(schedule, costs)
        may_resplit = isinstance(costs, LayerCosts) and not (keeps_split and len(costs.split) == len(row.split or ()))
        if limit is None or not limit.in_bytes or not may_resplit or row.fits(limit):
            return row
        assert isinstance(costs, LayerCosts)
        most_bytes = limit.of_ranks(program.num_ranks, row.num_parts)
        shards = costs.shards if replicas is None else replicas if sharding.shard != NONE else 1
        other_splits = fitting_split(costs, program, most_bytes, shards)
        if other_splits.split is not None:
            row, _ = predict(schedule, replace(costs, split=other_splits.split))
    except PenstockError as error:
        return Refusal(name, str(error))
    return replace(row, other_splits=other_splits)


def _predict(
    name: str,
    schedule: Schedule,
    costs: Costs | LayerCosts,
    *,
    per_action: bool,
    replicas: int | None,
    sharding: Sharding,
) -> tuple[Comparison, Program]:
    """Prove a schedule and simulate it; return the figures, and its program (the schedule with its messages).

    The arguments are those of `compare`.

    Raises:
        PenstockError: the schedule cannot run, or the costs do not fit it.
    """
    # Costs per stage, such that all schedules do equal work in a step, with the exchanges of replicas if there are any.
    stage_costs = equal_work_costs(costs, schedule, per_action=per_action)
    if replicas is not None:
        stage_costs = of_replicas(stage_costs, replicas, is_sharded=sharding.shard != NONE)
    proved_plan = plan(
        schedule, stage_costs, shard=sharding.shard, residency=sharding.residency, look_ahead=sharding.look_ahead
    )
    timeline, program = proved_plan.timeline, proved_plan.program
    peak_and_static_bytes = [sum(parts) for parts in zip(timeline.peak_bytes, timeline.static_bytes, strict=True)]
    row = Comparison(
        name=name,
        makespan_s=timeline.makespan_s,
        span_s=timeline.span_s,
        bubble_fraction=timeline.bubble_fraction,
        bubble_rate=timeline.bubble_rate,
        peak_activations=timeline.peak_activations,
        num_messages=len(program.rows_of(IS_SEND)),
        num_microbatches=schedule.num_microbatches,
        num_parts=schedule.parts_per_rank,
        peak_bytes=peak_and_static_bytes if any(stage_costs.activation_bytes) else None,
        num_copies=len(schedule.placement.routes),
        split=split_sizes(layers_of_stages(costs, schedule.placement)) if isinstance(costs, LayerCosts) else None,
        step_s=None if replicas is None else timeline.step_s,
        num_gathers=len(program.rows_of(GATHERS)),
        peak_whole=peak_whole(program),
        exchanges_are_free=not any(stage_costs.unshard_s) and not any(stage_costs.reduce_s),
    )
    return row, program


def equal_work_s(rows: Sequence[Comparison]) -> list[float]:
    """Return the seconds of each row for as many microbatches as the largest step has, in the row's own steps."""
    num_microbatches = max((row.num_microbatches for row in rows), default=0)
    return [row.time_s * num_microbatches / row.num_microbatches for row in rows]


def are_on_front(rows: Sequence[Comparison], limit: Limit | None) -> list[bool]:
    """Return for each row whether it fits and no other that fits beats it in step time (for equal work) and memory.

    Memory is that of activations, or with replicas all bytes. A row with two copies of the weights beats none with one.
    """
    seconds = equal_work_s(rows)
    fitting = [index for index, row in enumerate(rows) if limit is None or row.fits(limit)]
    on_front = set()
    for num_copies in {row.num_copies for row in rows}:
        rivals = [index for index in fitting if rows[index].num_copies <= num_copies]
        front = pareto_front([(seconds[index], float(rows[index].memory)) for index in rivals])
        on_front |= {rivals[place] for place in front if rows[rivals[place]].num_copies == num_copies}
    return [index in on_front for index in range(len(rows))]


def by_step_time(rows: Sequence[Comparison]) -> list[int]:
    """Return the indices of the rows: those with one copy of the weights first, then the fastest for equal work.

    Of equally fast ones, the one that holds less comes first, then the one with fewer messages.
    """
    seconds = equal_work_s(rows)

    def order(index: int) -> tuple[float, ...]:
        row = rows[index]
        return (row.num_copies, float(f"{seconds[index]:.9g}"), float(row.memory), row.num_messages)

    return sorted(range(len(rows)), key=order)


def fastest_within(rows: Sequence[Comparison], limit: Limit) -> Comparison | None:
    """Return the row that is the fastest, for equal work, of those that fit; None where none does."""
    fitting = [(seconds, row) for seconds, row in zip(equal_work_s(rows), rows, strict=True) if row.fits(limit)]
    return min(fitting, key=lambda pair: pair[0], default=(0.0, None))[1]
