"""Timelines as plain text: figures with their units, and tables of several timelines side by side."""

from collections.abc import Mapping

from penstock.errors import count_of as count_of
from penstock.ir.timeline import Timeline
from penstock.ir.units import byte_unit as byte_unit
from penstock.ir.units import format_bytes as format_bytes
from penstock.ir.units import three_digits
from penstock.tables import Column, table_text

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def time_unit(duration_s: float) -> tuple[float, str]:
    """Return the seconds and the name of the largest unit that is not above the duration."""
    size = abs(duration_s)
    if size == 0.0:
        return TIME_UNITS[0]
    # Rounding to three digits may lift 999.96 ms to 1 s, hence not exactly 1.
    return next((unit for unit in TIME_UNITS if size >= 0.9995 * unit[0]), TIME_UNITS[-1])


def format_seconds(duration_s: float) -> str:
    """Return a duration in three digits and its natural unit: `1.23 ms`, `45.6 µs`, `2.00 s`; whole above 1,000 s."""
    unit_s, name = time_unit(duration_s)
    return f"{three_digits(duration_s / unit_s)} {name}"


def format_share(share: float) -> str:
    """Return a fraction as a percentage: `12.5 %`."""
    return f"{100 * share:.1f} %"


def summary_table(timelines: Mapping[str, Timeline]) -> str:
    """Return the figures of the named timelines, then those of each rank, as aligned text without a final newline.

    `idle` is the makespan without the rank's work, so that it adds up to the bubble fraction.
    """
    whole = [
        (
            name,
            format_seconds(timeline.makespan_s),
            format_seconds(timeline.span_s),
            format_share(timeline.bubble_fraction),
            format_share(timeline.bubble_rate),
        )
        for name, timeline in timelines.items()
    ]
    num_ranks = max((timeline.num_ranks for timeline in timelines.values()), default=0)
    ranks: list[tuple[str, ...]] = [
        (str(rank), name, *_rank_figures(timeline, rank))
        for rank in range(num_ranks)
        for name, timeline in timelines.items()
        if rank < timeline.num_ranks
    ]
    headings = ["work", "idle", "peak activations", "peak bytes"]
    if not any(max(timeline.peak_bytes) for timeline in timelines.values()):
        headings.pop()
        ranks = [row[:-1] for row in ranks]
    of_all = [Column("timeline", is_text=True), *map(Column, ("makespan", "span", "bubble fraction", "bubble rate"))]
    of_ranks = [Column("rank", is_text=True), Column("timeline", is_text=True), *map(Column, headings)]
    return f"{table_text(of_all, whole)}\n\n{table_text(of_ranks, ranks)}"


def _rank_figures(timeline: Timeline, rank: int) -> tuple[str, str, str, str]:
    work_s = float(timeline.work_s[rank])
    peak_bytes = timeline.peak_bytes[rank]
    return (
        format_seconds(work_s),
        format_seconds(max(timeline.makespan_s - work_s, 0.0)),
        str(timeline.peak_activations[rank]),
        format_bytes(peak_bytes) if peak_bytes else "-",
    )
