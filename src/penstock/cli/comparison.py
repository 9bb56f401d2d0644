"""What `penstock compare` finds out about each schedule, and how it is written down."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np

from penstock.cli.stage_costs import stage_costs
from penstock.cli.wanted import Wanted
from penstock.errors import PenstockError
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.planning import plan
from penstock.proofs import Limit
from penstock.searching.front import pareto_front
from penstock.show.pareto import Candidate
from penstock.show.text import align, format_bytes
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import COMPUTE_FIELDS


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is predicted of one schedule; fractions of time are between 0 and 1."""

    name: str
    makespan_s: float
    span_s: float
    bubble_fraction: float
    bubble_rate: float
    peak_activations: list[int]
    num_messages: int
    num_microbatches: int
    num_parts: Fraction
    """Stages and slices that a rank runs for one microbatch, in the mean."""
    peak_bytes: list[int] | None = None
    """Per rank, with what is always there; None where the costs do not say how large activations are."""

    def fits(self, limit: Limit) -> bool:
        """Whether no rank holds more than it may; False for bytes where these are not known."""
        peaks = self.peak_bytes if limit.in_bytes else self.peak_activations
        return peaks is not None and bool((limit.of_ranks(len(peaks)) >= peaks).all())

    @property
    def peak_microbatches(self) -> Fraction:
        """The most that a rank holds, in all that one microbatch leaves on it."""
        return max(self.peak_activations) / self.num_parts


@dataclass(frozen=True, slots=True)
class Refusal:
    """A schedule that cannot have the shape that was asked for."""

    name: str
    reason: str


Row = Comparison | Refusal
FIGURES = (
    "makespan_s", "span_s", "bubble_fraction", "bubble_rate", "peak_activations", "peak_bytes", "num_microbatches",
)  # fmt: skip
"""The members of a comparison in JSON, next to its messages."""


def compare(wanted: Wanted, costs: Costs | LayerCosts, *, per_rank: bool = False) -> Row:
    """Make a schedule, prove it and simulate it; `per_rank` costs are divided over a rank's stages and slices."""
    try:
        schedule = wanted.make()
        num_parts = parts_per_rank(schedule)
        own_costs = stage_costs(costs, schedule)
        planned = plan(schedule, scale_durations(own_costs, float(1 / num_parts)) if per_rank else own_costs)
    except PenstockError as error:
        return Refusal(wanted.text, str(error))
    timeline = planned.timeline
    return Comparison(
        name=wanted.text,
        makespan_s=timeline.makespan_s,
        span_s=timeline.span_s,
        bubble_fraction=timeline.bubble_fraction,
        bubble_rate=timeline.bubble_rate,
        peak_activations=timeline.peak_activations,
        num_messages=count_messages(planned.program),
        num_microbatches=schedule.num_microbatches,
        num_parts=num_parts,
        peak_bytes=_total_bytes(timeline) if any(own_costs.activation_bytes) else None,
    )


def _total_bytes(timeline: Timeline) -> list[int]:
    return [sum(parts) for parts in zip(timeline.peak_bytes, timeline.static_bytes, strict=True)]


def parts_per_rank(schedule: Schedule) -> Fraction:
    """Return how many stages and slices a rank runs for one microbatch: 1 where each rank has one stage."""
    stages_on_route = max(len(route) for route in schedule.placement.routes)
    return Fraction(stages_on_route * schedule.num_slices, schedule.num_ranks)


def scale_durations(costs: Costs, factor: float) -> Costs:
    """Return costs whose actions take `factor` times as long; transfers keep theirs."""

    seconds = {name: tuple(factor * each for each in getattr(costs, name)) for name in COMPUTE_FIELDS}
    return replace(costs, **seconds)  # type: ignore[arg-type]


def count_messages(program: Program) -> int:
    """Return how many results cross from rank to rank."""
    return int(np.isin(program.op, (Op.SEND_FORWARD, Op.SEND_BACKWARD)).sum())


def equal_work_s(rows: Sequence[Row]) -> dict[str, float]:
    """Return, by name, the seconds for as many microbatches as the largest step has, in the row's own steps."""
    compared = [row for row in rows if isinstance(row, Comparison)]
    most = max((row.num_microbatches for row in compared), default=0)
    return {row.name: row.makespan_s * most / row.num_microbatches for row in compared}


def names_on_front(rows: Sequence[Row], limit: Limit | None) -> set[str]:
    """Return the rows that fit and that no other one that fits beats in step time (for equal work) and memory."""
    seconds = equal_work_s(rows)
    fitting = [row for row in rows if isinstance(row, Comparison) and (limit is None or row.fits(limit))]
    front = pareto_front([(seconds[row.name], float(row.peak_microbatches)) for row in fitting])
    return {fitting[index].name for index in front}


def candidates_of(rows: Sequence[Row], limit: Limit | None) -> list[Candidate]:
    """Return a point of step time (for equal work) and memory for each row that was not refused."""
    seconds, front = equal_work_s(rows), names_on_front(rows, limit)
    return [
        Candidate(
            row.name if limit is None or row.fits(limit) else f"{row.name} (over the limit)",
            seconds[row.name],
            float(row.peak_microbatches),
            row.name in front,
        )
        for row in rows
        if isinstance(row, Comparison)
    ]


def fastest_within(rows: Sequence[Row], limit: Limit) -> str:
    """Say which row is the fastest, for equal work, of those that fit."""
    seconds = equal_work_s(rows)
    fitting = [row.name for row in rows if isinstance(row, Comparison) and row.fits(limit)]
    fastest = min(fitting, key=lambda name: seconds[name], default="none fits")
    return f"fastest within {limit}: {fastest}"


def to_json(rows: Sequence[Row], limit: Limit | None, *, swept_limits: Sequence[Limit] = ()) -> str:
    """Write a list of objects, in the order of the names; one that was refused has an `error`, and no figures."""
    front = names_on_front(rows, limit)
    return json.dumps([_as_object(row, limit, front, swept_limits) for row in rows], indent=2)


def _as_object(row: Row, limit: Limit | None, front: set[str], swept_limits: Sequence[Limit]) -> dict[str, object]:
    members: dict[str, object] = {"name": row.name} | {key: getattr(row, key, None) for key in FIGURES}
    if isinstance(row, Refusal):
        fits = {} if limit is None and not swept_limits else {"fits": None}
        return members | {"messages": None, "is_on_front": None} | fits | {"error": row.reason}
    members |= {"messages": row.num_messages, "is_on_front": row.name in front}
    if swept_limits:
        return members | {"fits": {str(swept): row.fits(swept) for swept in swept_limits}}
    return members if limit is None else members | {"fits": row.fits(limit)}


def to_table(
    rows: Sequence[Row], limit: Limit | None, *, per_rank: bool = False, swept_limits: Sequence[Limit] = ()
) -> str:
    """Align the figures under their headings; notes below them say what they do not have in common.

    A star marks the front: no other row is better in both step time and memory.
    """
    front, seconds = names_on_front(rows, limit), equal_work_s(rows)
    counts = {row.num_microbatches for row in rows if isinstance(row, Comparison)}
    columns: dict[str, Callable[[Comparison], str]] = {
        "makespan s": lambda row: f"{row.makespan_s:.6g}",
        "span s": lambda row: f"{row.span_s:.6g}",
        "bubble fraction": lambda row: f"{max(row.bubble_fraction, 0.0):.4f}",  # rounding may leave -1e-16
        "bubble rate": lambda row: f"{max(row.bubble_rate, 0.0):.4f}",
        "peak activations": lambda row: str(max(row.peak_activations)),
        "in microbatches": lambda row: f"{float(row.peak_microbatches):.4g}",
        "messages": lambda row: str(row.num_messages),
    }
    if any(isinstance(row, Comparison) and row.peak_bytes for row in rows):
        columns["peak bytes"] = lambda row: format_bytes(max(row.peak_bytes)) if row.peak_bytes else ""
    if len(counts) > 1:
        columns[f"s for {max(counts)}"] = lambda row: f"{seconds[row.name]:.6g}"
    for shown_limit in swept_limits if limit is None else (limit,):
        columns[f"fits {shown_limit}"] = partial(_fits, limit=shown_limit)
    columns["front"] = lambda row: "*" if row.name in front else ""
    cells = [
        [row.name, *("" if isinstance(row, Refusal) else write(row) for write in columns.values())] for row in rows
    ]
    lines = align([["name", *columns], *cells], lambda column, _: not column, is_ruled=True)
    margin = len(lines[1].partition(" ")[0])
    for place, row in enumerate(rows, start=2):
        if isinstance(row, Refusal):
            lines[place] = f"{row.name.ljust(margin)}  refused: {_shortly(row.reason)}"
    within = [fastest_within(rows, swept) for swept in swept_limits]
    return "\n".join(lines + ([""] if within else []) + within + notes(rows, per_rank=per_rank))


def _fits(row: Comparison, *, limit: Limit) -> str:
    return "yes" if row.fits(limit) else "no"


def _shortly(reason: str) -> str:
    """The title of an error and the first of its findings."""
    return " ".join(line.strip() for line in reason.splitlines()[:2])


def notes(rows: Sequence[Row], *, per_rank: bool) -> list[str]:
    """Say in what the rows differ that should be equal: the work of an action, and the number of microbatches."""
    compared = [row for row in rows if isinstance(row, Comparison)]
    parts = _by_number((row.num_parts, row.name) for row in compared)
    counts = _by_number((Fraction(row.num_microbatches), row.name) for row in compared)
    lines = []
    if len(parts) > 1:
        fix = (
            "Each takes its share of the costs."
            if per_rank
            else "Costs are per action, so the rows do unequal work; --per-rank divides the costs by these numbers."
        )
        lines += ["", "note: actions of each kind that a rank runs for one microbatch:"]
        lines += [f"  {number} in {names}" for number, names in parts.items()]
        lines.append(f"  {fix}")
    is_named = all(f"{row.num_microbatches} microbatch" in row.name for row in compared)
    if len(counts) > 1 and not is_named:
        lines += ["", "note: the rows run different numbers of microbatches:"]
        lines += [f"  {number} in {names}" for number, names in counts.items()]
    return lines


def _by_number(pairs: Iterable[tuple[Fraction, str]]) -> dict[Fraction, str]:
    """The names that share a number, by number."""
    names: dict[Fraction, list[str]] = {}
    for number, name in sorted(pairs, key=lambda pair: pair[0]):
        names.setdefault(number, []).append(name)
    return {number: ", ".join(shared) for number, shared in names.items()}
