"""The result of one search, or of one per limit of memory, as a table, as JSON, or as a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import count_of
from penstock.ir.units import byte_unit, format_bytes
from penstock.partition.split import split_text
from penstock.proofs import Limit
from penstock.searching.front import pareto_front
from penstock.searching.result import SearchResult, best_result
from penstock.show.figures import describe_shape
from penstock.show.pareto import Candidate, Caption, LowerBound, pareto_picture
from penstock.show.picture import picture_of
from penstock.show.text import format_seconds
from penstock.tables import NO_SCREEN, Column, Screen, table_text

FIGURES = (
    "makespan_s", "span_s", "bubble_fraction", "bubble_rate", "lower_bound_s", "gap", "bound", "peak_bytes", "method",
    "seconds",
)  # fmt: skip
"""The members of a result in JSON."""
NO_SHORTER = "0: no order is shorter"
MEMORY_NAMES = {
    "microbatches": "peak activations of a rank, in those of one microbatch",
    "activations": "peak activations of a rank",
}
"""Names of an axis of memory, by the unit of the limits."""


@dataclass(frozen=True, slots=True, eq=False)
class LimitResult:
    """The result of a search within one limit, or the reason why nothing fits."""

    limit: Limit
    result: SearchResult | None = None
    reason: str = ""


def combined(rows: Sequence[LimitResult]) -> list[LimitResult]:
    """Give each limit the best order and the largest bound that the searches within all limits have found for it.

    An order that fits a smaller limit fits this one too; of equally short orders it is the one that holds least. A
    bound within a larger limit holds within this one too.
    """
    results = [(row.limit.amounts[0], row.result) for row in rows if row.result]
    combined_rows = []
    for row in rows:
        if row.result is None:
            combined_rows.append(row)
            continue
        limit = row.limit.amounts[0]
        best = best_result([result for amount, result in results if amount <= limit])
        bound = max((result.bound for amount, result in results if amount >= limit), key=lambda bound: bound.seconds)
        best_fields = {name: getattr(best, name) for name in ("plan", "costs", "method", "noise")}
        combined_rows.append(replace(row, result=replace(row.result, **best_fields, bound=bound)))
    return combined_rows


# ---- JSON


def to_json(result: SearchResult) -> str:
    """Return the figures of one search as a JSON object."""
    return json.dumps(_members(result), indent=2)


def rows_to_json(rows: Sequence[LimitResult]) -> str:
    """Return a list of JSON objects, one per limit; where nothing fits it has an `error`, and no figures."""
    objects = []
    for row in rows:
        members = dict.fromkeys(FIGURES) | {"error": row.reason} if row.result is None else _members(row.result)
        objects.append({"memory_limit": str(row.limit)} | members)
    return json.dumps(objects, indent=2)


def _members(result: SearchResult) -> dict[str, Any]:
    bound = {"name": result.bound.name, "rank": result.bound.rank, "terms": result.bound.terms}
    timeline_figures = ("bubble_fraction", "bubble_rate")
    members = {
        key: bound if key == "bound" else getattr(result.timeline if key in timeline_figures else result, key)
        for key in FIGURES
    }
    members |= {"split": result.split} if result.split else {}
    return members | ({"noise": asdict(result.noise)} if result.noise else {})


# ---- the table


def to_table(result: SearchResult, screen: Screen = NO_SCREEN) -> str:
    """Return the figures of one search, one a line."""
    schedule, peaks = result.schedule, result.peak_bytes if any(result.peak_bytes) else []
    rows = {
        "schedule": f"{schedule.name}, {schedule.placement.style} on {count_of(schedule.num_ranks, 'rank')}",
        **({"split": f"{split_text(result.split)}, in which an order fits"} if result.split else {}),
        "makespan": f"{result.makespan_s:.6g} s",
        "span": f"{result.span_s:.6g} s",
        "bubble": f"{result.timeline.bubble_fraction:.2%}",
        "lower bound": f"{result.lower_bound_s:.6g} s: {result.bound}",
        "gap": NO_SHORTER if result.is_optimal else f"{result.gap:.2%}",
        **({"peak memory": " ".join(map(format_bytes, peaks))} if peaks else {}),
        "peak activations": " ".join(map(str, result.timeline.peak_activations)),
        **({"with noise": _noise_text(result)} if result.noise else {}),
        "searched": f"{result.evaluations:,} sequences",
    }
    width = max(map(len, rows))
    return screen.wrapped("\n".join(f"{name:{width}}  {value}" for name, value in rows.items()))


def _noise_text(result: SearchResult) -> str:
    noise = result.noise
    assert noise is not None
    mean_text = f"{noise.mean_s:.6g} s on average ({noise.mean_s / result.objective_s - 1:+.2%})"
    if not noise.family:
        return mean_text
    return f"{mean_text}; {noise.family} {noise.family_mean_s:.6g} s ({noise.family_mean_s / noise.family_s - 1:+.2%})"


def rows_to_table(rows: Sequence[LimitResult], screen: Screen = NO_SCREEN) -> str:
    """Return a row per limit, and below them the limits that nothing fits."""
    results = [row.result for row in rows if row.result]
    has_bytes = any(max(result.peak_bytes) for result in results)
    by_span = any(result.objective == "span" for result in results)
    columns = [
        Column("memory limit", is_text=True),
        Column("makespan s"),
        Column("span s", drop_order=5),
        Column("bubble", drop_order=3),
        Column("bound of the span s" if by_span else "lower bound s"),
        Column("gap"),
        Column("peak memory" if has_bytes else "peak microbatches", drop_order=1),
        Column("method", drop_order=2),
    ]
    cells = [[str(row.limit), *_cells(row.result, has_bytes=has_bytes)] for row in rows if row.result]
    parts = [table_text(columns, cells, screen)]
    if any(result.is_optimal for result in results):
        parts.append("gap 0: no order is shorter")
    if len(results) < len(rows):
        parts.append("\n".join(["nothing fits:", *refusals(rows)]))
    return "\n\n".join([parts[0], *map(screen.wrapped, parts[1:])])


def refusals(rows: Sequence[LimitResult]) -> list[str]:
    """Return a line for each limit that nothing fits."""
    return [f"  {row.limit}: {row.reason}" for row in rows if row.result is None]


def _cells(result: SearchResult, *, has_bytes: bool) -> list[str]:
    peak = format_bytes(max(result.peak_bytes)) if has_bytes else f"{_amount(result, 'microbatches'):.4g}"
    return [
        f"{result.makespan_s:.6g}",
        f"{result.span_s:.6g}",
        f"{result.timeline.bubble_fraction:.2%}",
        f"{result.lower_bound_s:.6g}",
        "0" if result.is_optimal else f"{result.gap:.2%}",
        peak,
        result.schedule.name if result.method == "family" else result.method,
    ]


# ---- the picture


def to_picture(result: SearchResult, *, costs_text: str, limit: Limit | None, format: str, theme: str | None) -> bytes:
    """Draw the timeline of a result, with its lower bound and the gap beside its figures."""
    within = f", within {limit}" if limit else ""
    title = f"{describe_shape(result.timeline.program)}{within}, predicted with {costs_text}"
    name = "lower bound" if result.objective == "makespan" else "lower bound of the span"
    more = {"with static bytes": format_bytes(max(result.peak_bytes))} if any(result.timeline.static_bytes) else {}
    gap = NO_SHORTER if result.is_optimal else _percent(result.gap)
    more |= {name: format_seconds(result.lower_bound_s), "gap": gap}
    return picture_of(result.timeline, format, costs=result.costs, title=title, theme=theme, more=more)


def rows_to_picture(
    rows: Sequence[LimitResult], shape: Mapping[str, int], *, costs_text: str, format: str, theme: str | None
) -> bytes:
    """Draw step time against memory, a point per limit, and the lower bounds; at least one row has a result."""
    limits = [row.limit for row in rows if row.result]
    results = [row.result for row in rows if row.result]
    unit, (size, memory_name) = rows[0].limit.unit, _memory_unit(results, rows[0].limit)
    amounts = [_amount(result, unit) / size for result in results]
    front = pareto_front([(result.objective_s, amount) for result, amount in zip(results, amounts, strict=True)])
    gaps = ["0" if result.is_optimal else _percent(result.gap) for result in results]
    candidates = [
        Candidate(f"{limits[index]}: gap {gaps[index]}", result.objective_s, amounts[index], index in front)
        for index, result in enumerate(results)
    ]
    limit_amounts = [float(limit.amounts[0]) / size for limit in limits]
    bounds = [LowerBound(limit_amounts[index], result.lower_bound_s) for index, result in enumerate(results)]
    sizes = [count_of(number, noun) for noun, number in shape.items()]
    by_span = any(result.objective == "span" for result in results)
    name = "span" if by_span else "step time"
    title = ", ".join([f"{name.capitalize()} and memory of searched orders", *sizes, f"with {costs_text}"])
    caption = Caption(title, memory_name, time_name=name)
    return pareto_picture(candidates, caption, bounds=bounds, format=format, theme=theme)


def _memory_unit(results: Sequence[SearchResult], limit: Limit) -> tuple[int, str]:
    """Return the unit in which memory is drawn, and the name of its axis."""
    if not limit.in_bytes:
        return 1, MEMORY_NAMES[limit.unit]
    size_bytes, name = byte_unit(max(max(result.peak_bytes) for result in results))
    return size_bytes, f"peak memory of a rank, in {name}"


def _amount(result: SearchResult, unit: str) -> float:
    """Return the most that a rank holds, in the unit of a limit."""
    if unit == "bytes":
        return max(result.peak_bytes)
    parts = result.schedule.parts_per_rank if unit == "microbatches" else 1
    return float(max(result.timeline.peak_activations) / parts)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
