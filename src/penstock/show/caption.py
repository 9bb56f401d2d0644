"""The texts around a drawing: the title with its figures, the legend, and the names and figures of the lanes."""

from collections.abc import Sequence
from typing import Any

from penstock.ir.timeline import Timeline
from penstock.show.bars import last_end_s, window_s
from penstock.show.figures import idle_share, legend_of, peak_microbatches
from penstock.show.lanes import Detail, Lane, TimeScale, columns_for
from penstock.show.layout import describe_shades
from penstock.show.sheet import Sheet, scale_of
from penstock.show.text import format_seconds, format_share

TITLE_AT, FIGURES_AT, LEGEND_AT, NOTE_AT = 0.3, 0.58, 0.88, 1.16
"""Where the texts above a drawing are, in inches below the top of a sheet of scale 1."""
LINE = 0.22
"""The distance between two notes, in inches of a sheet of scale 1."""
MAX_NAMED_LANES = 64
HAIR = 1 / 500
"""The share of a chart's width below which a bar is too short for its sort to be in the legend."""


def notes_on(lanes: Sequence[Lane], detail: Detail, scale: TimeScale, inner_width: float) -> list[str]:
    """Return notes on what a reader cannot guess: shades, halves, columns, and lanes of several ranks."""
    program = lanes[0].timeline.program
    notes = [describe_shades(program)]
    if detail is Detail.MERGED:
        edges_s = columns_for(lanes, scale.end_s, inner_width)
        width = format_seconds(float(edges_s[1] - edges_s[0]))
        notes.append(f"too many blocks to draw: a column is {width} of a rank's time, stacked by what it went to")
    if detail is Detail.PLAIN and program.is_compute.any():
        notes.append(
            "blocks are too narrow or too many for the numbers of their microbatches; the HTML page shows them"
        )
    if detail is not Detail.MERGED and program.joined.any():
        notes.append("upper and lower half of a block: two actions that overlap")
    if len(lanes[0].ranks) > 1:
        notes.append(f"a lane is the mean of {len(lanes[0].ranks)} ranks")
    return [note for note in notes if note]


def top_margin(notes: Sequence[str], inner_width: float) -> float:
    """Return the inches that title, figures, legend and notes take."""
    return scale_of(inner_width) * (NOTE_AT + LINE * len(notes) if notes else NOTE_AT + 0.04)


def add_title(sheet: Sheet, title: str, figures: str, notes: Sequence[str]) -> None:
    """Write the title, the figures below it and, below the legend, the notes."""
    sheet.write(title, TITLE_AT, size=13, is_bold=True)
    sheet.write(figures, FIGURES_AT, size=10)
    for index, note in enumerate(notes):
        sheet.write(note, NOTE_AT + LINE * index, size=8.5, is_faint=True)


def add_legend(sheet: Sheet, timelines: list[Timeline]) -> None:
    """Draw the legend of a chart below its figures: the kinds of computation that occur, the bubble, and bars.

    A kind has one patch per shade, since stages of a rank have shades of their own; matplotlib draws a tuple of patches
    side by side. Bars that are too short to be seen (`HAIR` of the chart's width) are left out.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    hair_s = HAIR * max(map(last_end_s, timelines))
    entries = legend_of(timelines, ink=sheet.theme.ink, bubble=sheet.theme.bubble, longer_than_s=hair_s)
    shades = max(map(len, entries.values()))
    swatches = [[Patch(facecolor=colour, linewidth=0) for colour in ramp] for ramp in entries.values()]
    legend = sheet.figure.legend(
        handles=[tuple(swatch) if len(swatch) > 1 else swatch[0] for swatch in swatches],
        labels=list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="center left",
        bbox_to_anchor=(sheet.left, 1 - sheet.scale * LEGEND_AT / sheet.height),
        ncols=len(entries),
        frameon=False,
        fontsize=8.5 * sheet.scale,
        labelcolor=sheet.theme.ink,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.3 if shades == 1 else 0.8 * min(shades, 4),
        handleheight=1.0,
        columnspacing=1.6,
    )
    legend.set_in_layout(False)


def name_ranks(axes: Any, lanes: Sequence[Lane], sheet: Sheet) -> None:
    """Write the ranks' names at the left of their lanes, of very many only some; two lanes of a rank share a name."""
    step = 1 + (len(lanes) - 1) // MAX_NAMED_LANES
    places: dict[range, list[float]] = {}
    for lane in lanes[::step]:
        places.setdefault(lane.ranks, []).append(lane.middle)
    names = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}" for ranks in places]
    size = 9 * sheet.scale if len(places) <= 24 else 7
    axes.set_yticks([sum(middles) / len(middles) for middles in places.values()], names)
    axes.tick_params(axis="y", length=0, labelsize=size)


def add_lane_figures(axes: Any, lanes: Sequence[Lane], scale: TimeScale, sheet: Sheet, *, names_source: bool) -> None:
    """Write each lane's idle share and its peak, or its timeline, to the right of it, and mark its timeline's end."""
    theme = sheet.theme
    for lane in lanes:
        share = format_share(idle_share(lane.timeline, lane.ranks))
        peak = peak_microbatches(lane.timeline, lane.ranks)
        text = f"{lane.timeline.source}  {share} idle" if names_source else f"{share} idle, peak {peak}"
        axes.annotate(
            text,
            (1.0, lane.middle),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=7 * sheet.scale if len(lanes) <= 40 else 6,
            color=theme.ink if lane.paleness == 0 else theme.faint,
            va="center",
        )
        end = window_s(lane.timeline)[1] / scale.unit_s
        axes.plot(
            [end, end], [lane.bottom - 0.02, lane.bottom + lane.height + 0.02], color=theme.ink, linewidth=1, zorder=4
        )
