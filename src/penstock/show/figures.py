"""The texts above every picture of a timeline: its title, its four figures and its legend."""

from collections.abc import Iterable

from penstock.ir.operations import Kind
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.show.bars import COLOURS, NAMES, sorts_used
from penstock.show.layout import kinds_used, num_shades
from penstock.show.palette import block_colours, legend_name
from penstock.show.text import count_of, format_bytes, format_seconds, format_share


def describe_shape(program: Program) -> str:
    """Return a title: the schedule's name, and how many ranks, stages, microbatches and slices it is for."""
    parts = [program.name, count_of(program.num_ranks, "rank")]
    if program.num_stages != program.num_ranks:
        parts.append(count_of(program.num_stages, "stage"))
    parts.append(count_of(program.num_microbatches, "microbatch"))
    if program.num_slices > 1:
        parts.append(count_of(program.num_slices, "slice"))
    return ", ".join(parts)


def figures_of(timeline: Timeline) -> dict[str, str]:
    """Return the four figures of a timeline by their names: makespan, span, bubble fraction, and peak of memory.

    Where clocks of several hosts were laid together, a fifth says how far apart they may still be.
    """
    clocks = {"clocks": f"within {format_seconds(timeline.clock_uncertainty_s)}"}
    return {
        "makespan": format_seconds(timeline.makespan_s),
        "span": format_seconds(timeline.span_s),
        # Rounding may leave -1e-16 where there is no bubble.
        "bubble fraction": format_share(max(timeline.bubble_fraction, 0.0)),
        "peak": _peak(timeline),
        **(clocks if timeline.clock_uncertainty_s else {}),
    }


def legend_of(
    timelines: list[Timeline], *, ink: str, bubble: str, longer_than_s: float = 0.0
) -> dict[str, tuple[str, ...]]:
    """Return the entries of a legend, colours by name: kinds in the shades of their stages, the bubble, and bars.

    `ink` and `bubble` are colours of the theme. A sort of bars is there if a bar is longer than `longer_than_s`.
    """
    ramps = block_colours(max(num_shades(timeline.program) for timeline in timelines))
    kinds = {legend_name(Kind(kind)): ramps[Kind(kind)] for kind in kinds_used(timelines)}
    sorts = sorts_used(timelines, longer_than_s=longer_than_s)
    bars = {NAMES[sort]: (COLOURS.get(sort, ink),) for sort in sorts}
    return {**kinds, "bubble": (bubble,), **bars}


def idle_share(timeline: Timeline, ranks: range) -> float:
    """Return the share of the makespan in which ranks do not work, in the mean."""
    makespan_s = timeline.makespan_s
    work_s = float(timeline.work_s[list(ranks)].mean())
    return max(1 - work_s / makespan_s, 0.0) if makespan_s else 0.0


def peak_microbatches(timeline: Timeline, ranks: Iterable[int]) -> str:
    """Return the most that one of the ranks holds, in all activations that a microbatch leaves on a rank."""
    peak = max(timeline.peak_activations[rank] for rank in ranks)
    return f"{peak / float(timeline.program.parts_per_rank):.4g}"


def _peak(timeline: Timeline) -> str:
    peak_bytes = max(timeline.peak_bytes)
    number = peak_microbatches(timeline, range(timeline.num_ranks))
    text = f"{number} {'microbatch' if number == '1' else 'microbatches'}"
    return f"{text} ({format_bytes(peak_bytes)})" if peak_bytes else text
