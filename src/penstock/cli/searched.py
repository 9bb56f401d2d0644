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
class Within:
    """The order that was found within one limit, or the reason why there is nothing."""

    limit: Limit
    found: SearchResult | None = None
    reason: str = ""


def combined(rows: Sequence[Within]) -> list[Within]:
    """Give each limit the best order and the largest bound that the searches within all limits have found for it.

    An order that fits a smaller limit fits this one too; of equally short orders it is the one that holds least. A
    bound within a larger limit holds within this one too.
    """
    changed = []
    for row in rows:
        if row.found is None:
            changed.append(row)
            continue
        amount = row.limit.amounts[0]
        fitting = [each.found for each in rows if each.found and each.limit.amounts[0] <= amount]
        bounds = [each.found.bound for each in rows if each.found and each.limit.amounts[0] >= amount]
        best = best_result(fitting)
        bound = max(bounds, key=lambda bound: bound.seconds)
        own = replace(row.found, plan=best.plan, costs=best.costs, method=best.method, noise=best.noise, bound=bound)
        changed.append(replace(row, found=own))
    return changed


# ---- JSON


def to_json(found: SearchResult) -> str:
    """Write the figures of one search."""
    return json.dumps(_members(found), indent=2)


def rows_to_json(rows: Sequence[Within]) -> str:
    """Write a list of objects, one per limit; where nothing fits it has an `error`, and no figures."""
    objects = []
    for row in rows:
        members = dict.fromkeys(FIGURES) | {"error": row.reason} if row.found is None else _members(row.found)
        objects.append({"memory_limit": str(row.limit)} | members)
    return json.dumps(objects, indent=2)


def _members(found: SearchResult) -> dict[str, Any]:
    bound = {"name": found.bound.name, "rank": found.bound.rank, "terms": found.bound.terms}
    of_timeline = ("bubble_fraction", "bubble_rate")
    members = {
        key: bound if key == "bound" else getattr(found.timeline if key in of_timeline else found, key)
        for key in FIGURES
    }
    members |= {"split": found.split} if found.split else {}
    return members | ({"noise": asdict(found.noise)} if found.noise else {})


# ---- the table


def to_table(found: SearchResult, screen: Screen = NO_SCREEN) -> str:
    """Return the figures of one search, one a line."""
    schedule, peaks = found.schedule, found.peak_bytes if any(found.peak_bytes) else []
    rows = {
        "schedule": f"{schedule.name}, {schedule.placement.style} on {count_of(schedule.num_ranks, 'rank')}",
        **({"split": f"{split_text(found.split)}, in which an order fits"} if found.split else {}),
        "makespan": f"{found.makespan_s:.6g} s",
        "span": f"{found.span_s:.6g} s",
        "bubble": f"{found.timeline.bubble_fraction:.2%}",
        "lower bound": f"{found.lower_bound_s:.6g} s: {found.bound}",
        "gap": NO_SHORTER if found.is_optimal else f"{found.gap:.2%}",
        **({"peak memory": " ".join(map(format_bytes, peaks))} if peaks else {}),
        "peak activations": " ".join(map(str, found.timeline.peak_activations)),
        **({"with noise": _noise_text(found)} if found.noise else {}),
        "searched": f"{found.evaluations:,} sequences",
    }
    width = max(map(len, rows))
    return screen.wrapped("\n".join(f"{name:{width}}  {value}" for name, value in rows.items()))


def _noise_text(found: SearchResult) -> str:
    noise = found.noise
    assert noise is not None
    own = f"{noise.mean_s:.6g} s on average ({noise.mean_s / found.objective_s - 1:+.2%})"
    if not noise.family:
        return own
    return f"{own}; {noise.family} {noise.family_mean_s:.6g} s ({noise.family_mean_s / noise.family_s - 1:+.2%})"


def rows_to_table(rows: Sequence[Within], screen: Screen = NO_SCREEN) -> str:
    """Return a row per limit, and below them the limits that nothing fits."""
    found = [row.found for row in rows if row.found]
    has_bytes = any(max(each.peak_bytes) for each in found)
    by_span = any(each.objective == "span" for each in found)
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
    cells = [[str(row.limit), *_cells(row.found, has_bytes=has_bytes)] for row in rows if row.found]
    parts = [table_text(columns, cells, screen)]
    if any(each.is_optimal for each in found):
        parts.append("gap 0: no order is shorter")
    if len(found) < len(rows):
        parts.append("\n".join(["nothing fits:", *refusals(rows)]))
    return "\n\n".join([parts[0], *map(screen.wrapped, parts[1:])])


def refusals(rows: Sequence[Within]) -> list[str]:
    """Return a line for each limit that nothing fits."""
    return [f"  {row.limit}: {row.reason}" for row in rows if row.found is None]


def _cells(found: SearchResult, *, has_bytes: bool) -> list[str]:
    peak = format_bytes(max(found.peak_bytes)) if has_bytes else f"{_amount(found, 'microbatches'):.4g}"
    return [
        f"{found.makespan_s:.6g}",
        f"{found.span_s:.6g}",
        f"{found.timeline.bubble_fraction:.2%}",
        f"{found.lower_bound_s:.6g}",
        "0" if found.is_optimal else f"{found.gap:.2%}",
        peak,
        found.schedule.name if found.method == "family" else found.method,
    ]


# ---- the picture


def to_picture(found: SearchResult, *, costs_text: str, limit: Limit | None, format: str, theme: str | None) -> bytes:
    """Draw the timeline that was found, with its lower bound and the gap beside its figures."""
    within = f", within {limit}" if limit else ""
    title = f"{describe_shape(found.timeline.program)}{within}, predicted with {costs_text}"
    name = "lower bound" if found.objective == "makespan" else "lower bound of the span"
    more = {"with static bytes": format_bytes(max(found.peak_bytes))} if any(found.timeline.static_bytes) else {}
    more |= {name: format_seconds(found.lower_bound_s), "gap": NO_SHORTER if found.is_optimal else _percent(found.gap)}
    return picture_of(found.timeline, format, costs=found.costs, title=title, theme=theme, more=more)


def rows_to_picture(
    rows: Sequence[Within], shape: Mapping[str, int], *, costs_text: str, format: str, theme: str | None
) -> bytes:
    """Draw step time against memory, a point per limit, and the lower bounds; at least one row has a result."""
    found = {row.limit: row.found for row in rows if row.found}
    unit, (size, memory_name) = rows[0].limit.unit, _memory_unit(list(found.values()), rows[0].limit)
    memory = [_amount(each, unit) / size for each in found.values()]
    front = pareto_front([(each.objective_s, held) for each, held in zip(found.values(), memory, strict=True)])
    candidates = [
        Candidate(
            f"{limit}: gap {'0' if each.is_optimal else _percent(each.gap)}", each.objective_s, held, place in front
        )
        for place, ((limit, each), held) in enumerate(zip(found.items(), memory, strict=True))
    ]
    bounds = [LowerBound(float(limit.amounts[0]) / size, each.lower_bound_s) for limit, each in found.items()]
    sizes = [count_of(number, noun) for noun, number in shape.items()]
    by_span = any(each.objective == "span" for each in found.values())
    name = "span" if by_span else "step time"
    title = ", ".join([f"{name.capitalize()} and memory of searched orders", *sizes, f"with {costs_text}"])
    caption = Caption(title, memory_name, time_name=name)
    return pareto_picture(candidates, caption, bounds=bounds, format=format, theme=theme)


def _memory_unit(found: Sequence[SearchResult], limit: Limit) -> tuple[int, str]:
    """The unit in which memory is drawn, and what an axis says of it."""
    if not limit.in_bytes:
        return 1, MEMORY_NAMES[limit.unit]
    size_bytes, name = byte_unit(max(max(each.peak_bytes) for each in found))
    return size_bytes, f"peak memory of a rank, in {name}"


def _amount(found: SearchResult, unit: str) -> float:
    """The most that a rank holds, in the unit of a limit."""
    if unit == "bytes":
        return max(found.peak_bytes)
    parts = found.schedule.parts_per_rank if unit == "microbatches" else 1
    return float(max(found.timeline.peak_activations) / parts)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
