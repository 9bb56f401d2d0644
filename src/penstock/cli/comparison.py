"""What `penstock compare` finds out about each schedule, and how it is written down."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from penstock.cli.stage_costs import share_of_rank, stage_costs, stages_per_rank
from penstock.cli.wanted import Wanted
from penstock.errors import PenstockError
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.planning import plan
from penstock.proofs import Limit
from penstock.searching.front import pareto_front
from penstock.show.pareto import Candidate
from penstock.show.text import format_bytes
from penstock.simulation import Costs, LayerCosts
from penstock.tables import NO_SCREEN, Column, Screen, table_text


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


def compare(wanted: Wanted, costs: Costs | LayerCosts, *, per_action: bool = False) -> Row:
    """Make a schedule, prove it and simulate it.

    `costs` that are not per layer are those of all that a rank does for one microbatch, which its stages and slices
    share: so every schedule does equal work. With `per_action` they are those of each stage and slice as they are.
    """
    try:
        schedule = wanted.make()
        own_costs = stage_costs(costs, schedule)
        if isinstance(costs, Costs) and not per_action:
            own_costs = share_of_rank(costs, schedule)
        planned = plan(schedule, own_costs)
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
        num_parts=stages_per_rank(schedule) * schedule.num_slices,
        peak_bytes=_total_bytes(timeline) if any(own_costs.activation_bytes) else None,
    )


def _total_bytes(timeline: Timeline) -> list[int]:
    return [sum(parts) for parts in zip(timeline.peak_bytes, timeline.static_bytes, strict=True)]


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
    rows: Sequence[Row],
    limit: Limit | None,
    *,
    basis: str = "",
    per_action: bool = False,
    swept_limits: Sequence[Limit] = (),
    screen: Screen = NO_SCREEN,
) -> str:
    """Return the figures in a table; below it the refused schedules, and a line that says what is compared: `basis`.

    A star marks the front: no other row is better in both step time and memory.
    """
    compared = [row for row in rows if isinstance(row, Comparison)]
    front = names_on_front(rows, limit)
    writers = _writers(rows, front, swept_limits if limit is None else (limit,))
    cells = [[write(row) for write in writers.values()] for row in compared]
    styles = ["green" if row.name in front else "" for row in compared]
    refused = [f"  {row.name}: {_shortly(row.reason)}" for row in rows if isinstance(row, Refusal)]
    within = [fastest_within(rows, swept) for swept in swept_limits]
    parts = [
        ["not compared:", *refused] if refused else [],
        within,
        [basis] if basis else [],
        *notes(rows, per_action=per_action),
    ]
    below = "".join("\n\n" + screen.wrapped("\n".join(lines)) for lines in parts if lines)
    return table_text(list(writers), cells, screen, row_styles=styles) + below


def _writers(
    rows: Sequence[Row], front: set[str], limits: Sequence[Limit]
) -> dict[Column, Callable[[Comparison], str]]:
    """The columns of the table, and what each shows of a row."""
    seconds = equal_work_s(rows)
    counts = {row.num_microbatches for row in rows if isinstance(row, Comparison)}
    writers: dict[Column, Callable[[Comparison], str]] = {
        Column("name", is_text=True): lambda row: row.name,
        Column("makespan s"): lambda row: f"{row.makespan_s:.6g}",
        Column("span s", drop_order=8): lambda row: f"{row.span_s:.6g}",
        # rounding may leave -1e-16
        Column("bubble fraction", drop_order=2): lambda row: f"{max(row.bubble_fraction, 0.0):.4f}",
        Column("bubble rate", drop_order=7): lambda row: f"{max(row.bubble_rate, 0.0):.4f}",
        Column("peak activations", drop_order=6): lambda row: str(max(row.peak_activations)),
        Column("peak microbatches", drop_order=1): lambda row: f"{float(row.peak_microbatches):.4g}",
        Column("messages", drop_order=5): lambda row: str(row.num_messages),
    }
    if any(isinstance(row, Comparison) and row.peak_bytes for row in rows):
        writers[Column("peak bytes", drop_order=1)] = lambda row: format_bytes(max(row.peak_bytes or [0]))
    if len(counts) > 1:
        writers[Column(f"s for {max(counts)}", drop_order=1)] = lambda row: f"{seconds[row.name]:.6g}"
    for shown_limit in limits:
        if shown_limit is not None:
            writers[Column(f"fits {shown_limit}", drop_order=4)] = partial(_fits, limit=shown_limit)
    writers[Column("front", drop_order=3)] = lambda row: "*" if row.name in front else ""
    return writers


def _fits(row: Comparison, *, limit: Limit) -> str:
    return "yes" if row.fits(limit) else "no"


def _shortly(reason: str) -> str:
    """The title of an error and the first of its findings."""
    return " ".join(line.strip() for line in reason.splitlines()[:2])


def basis_of(costs: Costs | LayerCosts, name: str, *, per_action: bool) -> str:
    """Say in a line what the rows have in common: equal work, unless costs are per action."""
    if isinstance(costs, LayerCosts):
        return f"Equal work: {name} is per layer, and a stage has the costs of its layers."
    if per_action:
        return f"Costs per action: {name} for each stage and slice, however many a rank has."
    return (
        f"Equal work: {name} is all that a rank does for a microbatch; its stages and slices share it (--per-action)."
    )


def notes(rows: Sequence[Row], *, per_action: bool) -> list[list[str]]:
    """Say in what the rows differ that should be equal: the work of an action, and the number of microbatches."""
    compared = [row for row in rows if isinstance(row, Comparison)]
    parts = _by_number((row.num_parts, row.name) for row in compared)
    counts = _by_number((Fraction(row.num_microbatches), row.name) for row in compared)
    found = []
    if per_action and len(parts) > 1:
        heading = "note: the rows do unequal work; actions of each kind that a rank runs for one microbatch:"
        found.append([heading, *(f"  {number} in {names}" for number, names in parts.items())])
    is_named = all(f"{row.num_microbatches} microbatch" in row.name for row in compared)
    if len(counts) > 1 and not is_named:
        heading = "note: the rows run different numbers of microbatches:"
        found.append([heading, *(f"  {number} in {names}" for number, names in counts.items())])
    return found


def _by_number(pairs: Iterable[tuple[Fraction, str]]) -> dict[Fraction, str]:
    """The names that share a number, by number."""
    names: dict[Fraction, list[str]] = {}
    for number, name in sorted(pairs, key=lambda pair: pair[0]):
        names.setdefault(number, []).append(name)
    return {number: ", ".join(shared) for number, shared in names.items()}
