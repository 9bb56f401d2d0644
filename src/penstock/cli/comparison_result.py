"""What `penstock compare` writes: a table, JSON, or the picture of step time against memory."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cli.comparison import Comparison, Row, candidates_of, equal_work_s, to_json, to_table
from penstock.cli.pictures import CHARTS
from penstock.cli.sweep import LABELS
from penstock.proofs import Limit
from penstock.show.pareto import Caption, pareto_picture
from penstock.show.sweep_lines import SweptPoint, sweep_picture
from penstock.show.text import count_of
from penstock.tables import NO_SCREEN, Screen

MEMORY_NAME = "peak activations of a rank, in those of one microbatch"


def result_of(
    rows: Sequence[Row],
    format: str,
    arguments: Namespace,
    *,
    swept_limits: Sequence[Limit] = (),
    swept_sizes: Mapping[str, Sequence[int]] | None = None,
    basis: str = "",
    screen: Screen = NO_SCREEN,
) -> bytes:
    """Return the comparison in a format; names of a sweep say their sizes themselves, and `basis` what is equal.

    Raises:
        ConfigError: for a picture of nothing, and one that needs matplotlib where that is not installed.
    """
    limit = arguments.memory_limit
    if format in CHARTS:
        compared = [row for row in rows if isinstance(row, Comparison)]
        return _picture(compared, format, arguments, swept_sizes or {})
    if format == "json":
        text = to_json(rows, limit, swept_limits=swept_limits)
    else:
        per_action = arguments.per_action
        text = to_table(rows, limit, basis=basis, per_action=per_action, swept_limits=swept_limits, screen=screen)
    return f"{text}\n".encode()


def _picture(
    rows: Sequence[Comparison], format: str, arguments: Namespace, swept: Mapping[str, Sequence[int]]
) -> bytes:
    """One point per schedule; what does not fit into the limit is beaten by anything that does."""
    counts = {row.num_microbatches for row in rows}
    candidates = candidates_of(rows, arguments.memory_limit)
    if len(counts) > 1 and not arguments.sweep:
        sizes = [f", {row.num_microbatches} microbatches" for row in rows]
        candidates = [replace(one, label=one.label + size) for one, size in zip(candidates, sizes, strict=True)]
    is_unfair = arguments.per_action and len({row.num_parts for row in rows}) > 1
    warnings = ["ranks do unequal work: costs are per action"] if is_unfair else []
    warnings += [f"times are for {max(counts)} microbatches"] if len(counts) > 1 else []
    caption = Caption(_title(arguments), MEMORY_NAME, warning="; ".join(warnings))
    if len(swept) == 1:
        ((key, values),) = swept.items()
        return sweep_picture(
            _lines_of(rows, key, values), key.replace("_", " "), caption, format=format, theme=arguments.theme
        )
    return pareto_picture(candidates, caption, format=format, theme=arguments.theme)


def _lines_of(rows: Sequence[Comparison], key: str, values: Sequence[int]) -> dict[str, list[SweptPoint]]:
    """Return the points of each schedule over the one size that is swept, which the names of the rows end in."""
    seconds = equal_work_s(rows)
    lines: dict[str, list[SweptPoint]] = {}
    for row in rows:
        for value in values:
            ending = f", {LABELS[key](value)}"
            if row.name.endswith(ending):
                point = SweptPoint(value, seconds[row.name], float(row.peak_microbatches))
                lines.setdefault(row.name.removesuffix(ending), []).append(point)
    return lines


def _title(arguments: Namespace) -> str:
    sizes = {"rank": arguments.ranks, "microbatch": arguments.microbatches}
    parts = [count_of(number, noun) for noun, number in sizes.items() if number is not None]
    costs = f"{arguments.costs} per action" if arguments.per_action else arguments.costs
    return ", ".join(["Step time and memory", *parts, f"with {costs}"])
