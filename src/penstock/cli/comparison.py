"""The result of `penstock compare`: a table, JSON, or the picture of step time against memory."""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial

from penstock.cli.arguments import memory_limit_of
from penstock.cli.given_costs import costs_text, given_costs, require_split_used
from penstock.cli.sweep import LABELS, LIMITS, read_sweep, swept_schedules
from penstock.errors import count_of
from penstock.ir.units import byte_unit
from penstock.partition.split import split_text
from penstock.proofs import Limit
from penstock.searching.comparison import (
    Comparison,
    Refusal,
    are_on_front,
    by_step_time,
    compare,
    equal_work_s,
    fastest_within,
)
from penstock.show.pareto import Candidate, Caption, pareto_picture
from penstock.show.sweep_lines import SweptPoint, sweep_picture
from penstock.show.text import format_bytes
from penstock.simulation import LayerCosts
from penstock.tables import NO_SCREEN, Column, Screen, table_text

FIGURES = (
    "makespan_s", "span_s", "bubble_fraction", "bubble_rate", "peak_activations", "peak_bytes", "num_microbatches",
    "split",
)  # fmt: skip
"""The members of a comparison in JSON, next to its messages."""
REPLICA_FIGURES = {"step_s": "step_s", "gathers": "num_gathers", "peak_whole": "peak_whole"}
"""The attribute of a comparison behind each member in JSON that rows have where replicas are compared."""
MEMORY_NAME = "peak activations of a rank, in those of one microbatch"


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparedSchedules:
    """All schedules of one command, in the order of their names, and the costs and limits of their comparison."""

    rows: Sequence[Comparison | Refusal]
    costs: str
    """The costs as they were written on the command line."""
    per_layer: bool = False
    named_split: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    """The origin, in words, of each split that is not balanced."""
    per_action: bool = False
    limit: Limit | None = None
    """The memory limit; a schedule that does not fit is on no front."""
    swept_limits: Sequence[Limit] = ()
    swept_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The sizes that are swept, by key; the names of rows then end in theirs."""

    @cached_property
    def comparisons(self) -> list[Comparison]:
        return [row for row in self.rows if isinstance(row, Comparison)]

    @cached_property
    def refusals(self) -> list[Refusal]:
        return [row for row in self.rows if isinstance(row, Refusal)]

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of a step of each comparison, for equal work."""
        return equal_work_s(self.comparisons)

    @cached_property
    def front(self) -> list[bool]:
        """Whether each comparison is on the front of step time and memory."""
        return are_on_front(self.comparisons, self.limit)

    @cached_property
    def order(self) -> list[int]:
        """Indices of the comparisons as the table has them: by step time, or by size where sizes are swept."""
        return list(range(len(self.comparisons))) if self.swept_sizes else by_step_time(self.comparisons)

    @property
    def has_replicas(self) -> bool:
        """Whether the schedules run in several replicas, whose exchanges count."""
        return any(row.step_s is not None for row in self.comparisons)

    @property
    def differs_unsaid(self) -> bool:
        """Whether numbers of microbatches differ although the names of the rows do not say so."""
        are_named = all(f"{row.num_microbatches} microbatch" in row.name for row in self.comparisons)
        return len({row.num_microbatches for row in self.comparisons}) > 1 and not are_named

    @property
    def is_unfair(self) -> bool:
        """Whether ranks do more work in some rows than in others."""
        return self.per_action and len({row.num_parts for row in self.comparisons}) > 1

    def by_number(self, number_of: Callable[[Comparison], Fraction | int]) -> list[str]:
        """Return a line for each number, with the names that share it."""
        names: dict[Fraction | int, list[str]] = {}
        for row in sorted(self.comparisons, key=number_of):
            names.setdefault(number_of(row), []).append(row.name)
        return [f"  {number} in {', '.join(shared)}" for number, shared in names.items()]


def compared_by(arguments: Namespace) -> ComparedSchedules:
    """Compare the schedules that the arguments name, under the costs, limits and sizes that they give.

    Raises:
        ConfigError, FormatError: for schedules, costs, sweeps or limits that are none.
    """
    costs = given_costs(arguments, arguments.costs)
    per_layer = isinstance(costs, LayerCosts)
    sweep = read_sweep(arguments.sweep)
    limit, swept_limits = memory_limit_of(arguments, costs.activation_bytes), sweep.get(LIMITS, ())
    for swept_limit in swept_limits:
        swept_limit.require_sizes(costs.activation_bytes, "--sweep")
    schedules = swept_schedules(arguments, sweep)
    rows = [
        compare(
            schedule.text,
            schedule.make,
            costs,
            per_action=arguments.per_action,
            replicas=costs.replicas if schedule.replicas == 0 else schedule.replicas,
            sharding=schedule.sharding,
            limit=limit,
            keeps_split=arguments.split is not None,
        )
        for schedule in schedules
    ]
    require_split_used(arguments, {row.name: row.split for row in rows if isinstance(row, Comparison) and row.split})
    split_origin = "as given" if arguments.split else "as in the costs"
    return ComparedSchedules(
        rows=rows,
        costs=costs_text(arguments, arguments.costs),
        named_split={costs.split: split_origin} if isinstance(costs, LayerCosts) else {},
        per_layer=per_layer,
        per_action=arguments.per_action,
        limit=limit,
        swept_limits=swept_limits,
        swept_sizes={key: values for key, values in sweep.items() if key != LIMITS},
    )


# ---- JSON


def to_json(compared: ComparedSchedules) -> str:
    """Return a list of objects in the order of the names; that of a refused schedule has an `error`, and no figures."""
    is_on_front = dict(zip(map(id, compared.comparisons), compared.front, strict=True))
    objects = []
    for row in compared.rows:
        members: dict[str, object] = {"name": row.name} | {key: getattr(row, key, None) for key in FIGURES}
        members |= {"copies": getattr(row, "num_copies", None), "messages": getattr(row, "num_messages", None)}
        if compared.has_replicas:
            members |= {key: getattr(row, name, None) for key, name in REPLICA_FIGURES.items()}
        members["is_on_front"] = is_on_front.get(id(row))
        if compared.limit is not None or compared.swept_limits:
            members["fits"] = _fits_of(row, compared)
        objects.append(members | ({"error": row.reason} if isinstance(row, Refusal) else {}))
    return json.dumps(objects, indent=2)


def _fits_of(row: Comparison | Refusal, compared: ComparedSchedules) -> object:
    if isinstance(row, Refusal):
        return None
    if compared.limit is not None:
        return row.fits(compared.limit)
    return {str(limit): row.fits(limit) for limit in compared.swept_limits}


# ---- the table


def to_table(compared: ComparedSchedules, screen: Screen = NO_SCREEN) -> str:
    """Return the figures in a table; below it the refused schedules, and lines that say what is compared.

    The fastest comes first, unless sizes are swept. Rows with two copies of the weights are apart, below an empty line.
    A star marks the front: no other row is better in both step time and memory. The last line names the best.
    """
    writers, order = _writers(compared), compared.order
    rows = [compared.comparisons[index] for index in order]
    cells = [[write(index, row) for write in writers.values()] for index, row in zip(order, rows, strict=True)]
    styles = ["green" * compared.front[index] for index in order]
    first_copied = next((line for line, row in enumerate(rows) if row.num_copies > 1), 0)
    if first_copied and not compared.swept_sizes:
        cells.insert(first_copied, [""] * len(writers))
        styles.insert(first_copied, "")
    refusals = [f"  {names}: {reason}" for names, reason in grouped_refusals(compared.refusals)]
    parts = [
        ["not compared:", *refusals] if refusals else [],
        [_line_on_fastest(compared, limit) for limit in compared.swept_limits],
        [basis(compared)],
        *notes(compared),
        _lines_on_best(compared),
    ]
    paragraphs = ["\n".join(lines) for lines in parts if lines]
    table = table_text(list(writers), cells, screen, row_styles=styles)
    return "\n\n".join([table, *map(screen.wrapped, paragraphs)])


def grouped_refusals(refused: Sequence[Refusal]) -> list[tuple[str, str]]:
    """Return, for each reason to refuse schedules, the names of these schedules, and the reason in short.

    Reasons are equal if their problems are, apart from the own name. Of fixes that differ, the first is shown.
    """
    # The first two lines of a reason are the title of an error and the first of its findings.
    reasons = {row.name: " ".join(line.strip() for line in row.reason.splitlines()[:2]) for row in refused}
    groups: dict[str, dict[str, str]] = {}
    for name, reason in reasons.items():
        name_pattern = rf"(?<![\w-]){re.escape(re.split('[:,]', name)[0])} "
        problem, _, fix = reason.partition("; ")
        groups.setdefault(re.sub(name_pattern, "", problem), {})[name] = fix
    grouped = []
    for problem, fixes in groups.items():
        first, between = next(iter(fixes)), "; " if any("," in name for name in fixes) else ", "
        whose = f"for {first}: " if len(set(fixes.values())) > 1 else ""
        shared = "; ".join(filter(None, (problem, f"{whose}{fixes[first]}" if fixes[first] else "")))
        grouped.append((between.join(fixes), reasons[first] if len(fixes) == 1 else shared))
    return grouped


def _lines_on_best(compared: ComparedSchedules) -> list[str]:
    """Return a line on the fastest row that fits, and one before it if rows with two copies of the weights fit too."""
    rows, limit = compared.comparisons, compared.limit
    is_alone = len(rows) < 2 and not any(row.other_splits for row in rows)
    if is_alone or compared.swept_sizes or compared.swept_limits or compared.is_unfair:
        return []
    fitting = [index for index in compared.order if limit is None or rows[index].fits(limit)]
    if not fitting:
        return [f"best that fits: none of {len(rows)} within {limit}{_least(compared)}"]
    best, copied = fitting[0], next((index for index in fitting if rows[index].num_copies > 1), None)
    if best == copied:
        return [f"best that fits: {_figures(compared, best)}, with two copies of the weights"]
    copied_lines = [] if copied is None else [f"best with two copies of the weights: {_figures(compared, copied)}"]
    return [*copied_lines, f"best that fits: {_figures(compared, best)}"]


def _least(compared: ComparedSchedules) -> str:
    """Return the end of a line on rows of which none fits: the split that holds least, and if all splits were tried."""
    splits_of_rows = [(row.other_splits, row.name) for row in compared.comparisons if row.other_splits is not None]
    if not splits_of_rows:
        return ""
    splits, name = min(splits_of_rows, key=lambda pair: pair[0].least_bytes)
    overlooked = ", ".join(name for splits, name in splits_of_rows if not splits.is_exact)
    least = f"; least, {format_bytes(splits.least_bytes)}: {name}, {split_text(splits.least)}"
    return f"{least}. Not every split was tried of {overlooked}" if overlooked else f", whatever the split{least}"


def _figures(compared: ComparedSchedules, index: int) -> str:
    row = compared.comparisons[index]
    return f"{row.name}, {compared.seconds[index]:.6g} s, {count_of(row.num_messages, 'message')}"


def _writers(compared: ComparedSchedules) -> dict[Column, Callable[[int, Comparison], str]]:
    """Return the function that writes each column's cell of a row, by column; it gets the row's index and the row."""
    counts = {row.num_microbatches for row in compared.comparisons}
    has_copies = any(row.num_copies > 1 for row in compared.comparisons)
    writers: dict[Column, Callable[[int, Comparison], str]] = {
        Column("name", is_text=True): lambda _, row: row.name,
        **({Column("copies"): lambda _, row: str(row.num_copies)} if has_copies else {}),
        **({Column("step s"): lambda _, row: f"{row.time_s:.6g}"} if compared.has_replicas else {}),
        Column("makespan s", drop_order=9 * compared.has_replicas): lambda _, row: f"{row.makespan_s:.6g}",
        Column("span s", drop_order=8): lambda _, row: f"{row.span_s:.6g}",
        # Rounding may leave -1e-16 where there is no bubble.
        Column("bubble fraction", drop_order=2): lambda _, row: f"{max(row.bubble_fraction, 0.0):.4f}",
        Column("bubble rate", drop_order=7): lambda _, row: f"{max(row.bubble_rate, 0.0):.4f}",
        Column("peak activations", drop_order=6): lambda _, row: str(max(row.peak_activations)),
        Column("peak microbatches", drop_order=1): lambda _, row: f"{float(row.peak_microbatches):.4g}",
        Column("messages", drop_order=5): lambda _, row: str(row.num_messages),
    }
    if any(row.peak_bytes for row in compared.comparisons):
        writers[Column("peak bytes", drop_order=1)] = lambda _, row: format_bytes(max(row.peak_bytes or [0]))
    if any(row.num_gathers for row in compared.comparisons):
        writers[Column("gathers", drop_order=5)] = lambda _, row: str(row.num_gathers)
        writers[Column("whole stages", drop_order=3)] = lambda _, row: str(max(row.peak_whole or [0]) or "")
    if len(counts) > 1:
        writers[Column(f"s for {max(counts)}", drop_order=1)] = lambda index, _: f"{compared.seconds[index]:.6g}"
    for limit in compared.swept_limits if compared.limit is None else (compared.limit,):
        writers[Column(f"fits {limit}", drop_order=4)] = partial(_fits_text, limit)
    writers[Column("front", drop_order=3)] = lambda index, _: "*" * compared.front[index]
    return writers


def _fits_text(limit: Limit, _: int, row: Comparison) -> str:
    return "yes" if row.fits(limit) else "no"


def _line_on_fastest(compared: ComparedSchedules, limit: Limit) -> str:
    """Return a line on the row that is the fastest, for equal work, of those that fit."""
    row = fastest_within(compared.comparisons, limit)
    none = "none fits with these splits" if limit.in_bytes and compared.per_layer else "none fits"
    return f"fastest within {limit}: {row.name if row else none}"


def basis(compared: ComparedSchedules) -> str:
    """Return what the rows have in common: equal work, unless costs are per action."""
    costs = compared.costs
    if compared.per_layer:
        heading = f"Equal work: {costs} is per layer, and a stage has the costs of its layers."
        return "\n".join([heading, *_splits(compared)])
    if compared.per_action:
        return f"Costs per action: {costs} for each stage and slice, however many a rank has."
    return (
        f"Equal work: {costs} is all that a rank does for a microbatch; its stages and slices share it (--per-action)."
    )


def _splits(compared: ComparedSchedules) -> list[str]:
    """Return a line per split with the names of its rows."""
    names: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for row in compared.comparisons:
        if row.split:
            origin = compared.named_split.get(row.split, "balanced by the costs")
            is_within = row.other_splits is not None and row.other_splits.split == row.split
            origin = f"balanced within {compared.limit}" if is_within else origin
            names.setdefault((row.split, origin), []).append(row.name)
    return [f"  {split_text(split)}, {origin}: {', '.join(shared)}" for (split, origin), shared in names.items()]


def notes(compared: ComparedSchedules) -> list[list[str]]:
    """Return notes on differences of rows that should be equal: the work of an action, the number of microbatches."""
    parts = compared.by_number(lambda row: row.num_parts)
    paragraphs = []
    if compared.is_unfair:
        heading = "note: the rows do unequal work; actions of each kind that a rank runs for one microbatch:"
        paragraphs.append([heading, *parts])
    if compared.differs_unsaid:
        heading = "note: the rows run different numbers of microbatches:"
        paragraphs.append([heading, *compared.by_number(lambda row: row.num_microbatches)])
    if compared.has_replicas and all(row.exchanges_are_free for row in compared.comparisons):
        heading = "note: gathers and reductions take no time, since the costs give none:"
        fix = "  add unshard=0.5,reduce=0.5, or in a file parameter_bytes and gradient_bytes with"
        paragraphs.append([heading, fix, "  replica_bandwidth_bytes_per_s"])
    counted = [limit for limit in (compared.limit, *compared.swept_limits) if limit and limit.unit == "activations"]
    if counted and len(parts) > 1:
        heading = "warning: activations are of unequal size; a microbatch leaves so many on a rank:"
        fix = f"  Give the limit in microbatches, such as '{counted[0].text.split()[0]} microbatches'."
        paragraphs.append([heading, *parts, fix])
    return paragraphs


# ---- the picture


def to_picture(
    compared: ComparedSchedules, shape: Mapping[str, int | None], *, format: str, theme: str | None
) -> bytes:
    """Draw a point per schedule, or a line per schedule over the swept size; `shape` has their common numbers by noun.

    Raises:
        ConfigError: where nothing is to be drawn, and for a format that needs matplotlib where it is not installed.
    """
    counts = {row.num_microbatches for row in compared.comparisons}
    warnings = ["ranks do unequal work: costs are per action"] if compared.is_unfair else []
    warnings += [f"times are for {max(counts)} microbatches"] if len(counts) > 1 else []
    sizes = [count_of(number, noun) for noun, number in shape.items() if number is not None]
    costs = f"{compared.costs} per action" if compared.per_action else compared.costs
    title = ", ".join(["Step time and memory", *sizes, f"with {costs}"])
    caption = Caption(title, _memory_unit(compared)[1], warning="; ".join(warnings))
    if len(compared.swept_sizes) == 1 and "shard" not in compared.swept_sizes:
        ((key, values),) = compared.swept_sizes.items()
        lines = _lines(compared, key, values)
        return sweep_picture(lines, key.replace("_", " "), caption, format=format, theme=theme)
    candidates = [_candidate(compared, index) for index in range(len(compared.comparisons))]
    return pareto_picture(candidates, caption, format=format, theme=theme)


def _candidate(compared: ComparedSchedules, index: int) -> Candidate:
    """Return the point of a row, with its memory in the axis's unit, and with all that the picture says of it."""
    row, limit = compared.comparisons[index], compared.limit
    label = row.name if limit is None or row.fits(limit) else f"{row.name} (over the limit)"
    label += f", {row.num_microbatches} microbatches" * compared.differs_unsaid
    label += ", two copies of the weights" * (row.num_copies > 1)
    memory = float(row.memory) / _memory_unit(compared)[0]
    return Candidate(label, compared.seconds[index], memory, compared.front[index])


def _memory_unit(compared: ComparedSchedules) -> tuple[int, str]:
    """Return the unit of the memory by which rows are compared, and the name of its axis."""
    if not compared.has_replicas or any(row.peak_bytes is None for row in compared.comparisons):
        return 1, MEMORY_NAME
    size_bytes, name = byte_unit(max(int(row.memory) for row in compared.comparisons))
    return size_bytes, f"peak memory of a rank, in {name}"


def _lines(compared: ComparedSchedules, key: str, values: Sequence[int]) -> dict[str, list[SweptPoint]]:
    """Return the points of each schedule over the one size that is swept, which the names of the rows end in."""
    lines: dict[str, list[SweptPoint]] = {}
    for row, seconds in zip(compared.comparisons, compared.seconds, strict=True):
        for value in values:
            ending = f", {LABELS[key](value)}"
            if row.name.endswith(ending):
                point = SweptPoint(value, seconds, float(row.memory) / _memory_unit(compared)[0])
                lines.setdefault(row.name.removesuffix(ending), []).append(point)
    return lines
