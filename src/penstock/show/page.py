"""Timelines as one self-contained HTML page: a viewer in plain JavaScript, with the data in it, that asks no network.

header (JSON)   lanes, kinds, colours, figures      what a reader sees as text
data (base64)   one row per block, lane after lane  the columns of `block_table`, packed
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.ir.operations import OPERATIONS, Op
from penstock.ir.timeline import Timeline
from penstock.show.bars import COLOURS, FOOT, NAMES, last_end_s, window_s
from penstock.show.block_table import BlockTable, block_table, pack
from penstock.show.figures import describe_shape, figures_of, idle_share, legend_of, peak_microbatches
from penstock.show.layout import describe_shades, num_blocks, num_shades, period_s, typical_block_s
from penstock.show.palette import THEMES, VARIABLES, blend, block_colours, find_theme, ink_on, style_of_themes, to_hex
from penstock.show.text import format_share
from penstock.simulation.causes import NAME_OF_CAUSE, Cause
from penstock.simulation.costs.costs import Costs

MAX_BLOCKS = 2_000_000
MAX_BYTES = 5_000_000
"""The most bytes of a page: a browser opens so much at once, and a mail takes it along."""
MODULES = ("data.js", "draw.js", "view.js")
"""The modules of the viewer, each after those that it imports from."""
VIEWER = files("penstock.show") / "viewer"
MODULE_SYNTAX = re.compile(r"^(import .*\n|/\*\* @import .*\n|export )", re.MULTILINE)


def to_page(
    timelines: Mapping[str, Timeline],
    *,
    costs: Mapping[str, Costs] | None = None,
    main: str | None = None,
    title: str | None = None,
    theme: str | None = None,
    more: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """Return an HTML page that shows the named timelines, rank by rank below each other; all but `main` are drawn pale.

    By default, `main` is the last one. `costs`, by name, are those that timelines were predicted with, by which idle
    time is explained; without them, a timeline's own typical durations are used. Without a theme the page follows the
    reader's browser. `more` are figures beside those of each timeline, by name.

    Raises:
        ConfigError: for an unknown theme, and for more blocks than a page can hold.
    """
    attributes = f' data-theme="{find_theme(theme).name}"' if theme else ""
    timeline_list = list(timelines.values())
    block_count = num_blocks(timeline_list)
    if block_count > MAX_BLOCKS:
        raise _too_many(f"{block_count:,} computations are", max_bytes)
    table = block_table(timeline_list, [(costs or {}).get(key) for key in timelines])
    # The page has a header as JSON, and all columns packed as binary text, which its script draws.
    data, contents = pack(table.columns)
    name = title or f"{describe_shape(timeline_list[-1].program)}, {' and '.join(timelines)}"
    figures = {key: figures_of(timeline) | dict(more or {}) for key, timeline in timelines.items()}
    page = fill(
        "page.html",
        attributes=attributes,
        title=escape(name),
        label=escape(f"{name}. " + _figures_as_text(figures)),
        style="\n".join([*style_of_themes(), read("style.css")]),
        figures="\n".join(_figures(key if len(figures) > 1 else "", entry) for key, entry in figures.items()),
        legend=_legend(timeline_list),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in _notes(timeline_list)),
        script=bundle(MODULES),
        header=_as_script(_header(timelines, table, contents, main or list(timelines)[-1])),
        data=data,
    ).encode()
    if len(page) > max_bytes:
        raise _too_many(f"{block_count:,} computations need {len(page) / 1e6:.2g} MB, which is", max_bytes)
    return page


def _too_many(problem: str, max_bytes: int) -> ConfigError:
    return ConfigError(
        f"{problem} more than a page holds ({max_bytes / 1e6:.2g} MB); show fewer microbatches, or draw SVG or PNG, "
        "which merge what cannot be seen",
        key="format",
    )


def _as_script(value: dict[str, Any]) -> str:
    """Return JSON for the inside of a script element: no name in it can end the script."""
    return orjson.dumps(value).decode().replace("<", "\\u003c")


def _figures_as_text(figures: dict[str, dict[str, str]]) -> str:
    """Return the figures of all timelines in one line, for readers who hear the page."""
    lines = [
        [key, *(f"{name} {value}" for name, value in figures_of_timeline.items())]
        for key, figures_of_timeline in figures.items()
    ]
    return "; ".join(" ".join(line) for line in lines)


def _figures(name: str, figures: dict[str, str]) -> str:
    entries = [f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in figures.items()]
    heading = [f"<div><dd>{escape(name)}</dd></div>"] if name else []
    return f"<dl>{''.join(heading + entries)}</dl>"


def _legend(timelines: list[Timeline]) -> str:
    entries = legend_of(timelines, ink="var(--ink)", bubble="var(--bubble)")
    return "".join(
        f'<span><span class="swatch">{"".join(f"<i style=background:{colour}></i>" for colour in ramp)}</span>'
        f"{escape(name)}</span>"
        for name, ramp in entries.items()
    )


def _notes(timelines: list[Timeline]) -> list[str]:
    notes = [describe_shades(timelines[-1].program)]
    if any(timeline.program.joined.any() for timeline in timelines):
        notes.append("upper and lower half of a block: two actions that overlap")
    return [note for note in notes if note]


def _header(
    timelines: Mapping[str, Timeline], table: BlockTable, contents: list[dict[str, Any]], main: str
) -> dict[str, Any]:
    """Return what the page's script reads beside the packed columns: units, colours, names, and the lanes of the table.

    Ticks are the page's unit of time. `contents` says where each column is in the packed data, and `main` is the name
    of the timeline that is not drawn pale.
    """
    timeline_list = list(timelines.values())
    shade_counts = sorted({num_shades(timeline.program) for timeline in timeline_list})
    colours = {str(count): block_colours(count) for count in shade_counts}
    longest_s = max(map(last_end_s, timeline_list))
    return {
        "tick_s": table.tick_s,
        "end_ticks": max(longest_s / table.tick_s, 1.0),
        "period_ticks": max(max(map(period_s, timeline_list)) / table.tick_s, 1.0),
        "typical_ticks": typical_block_s(timeline_list) / table.tick_s,
        "num_slices": max(timeline.program.num_slices for timeline in timeline_list),
        "is_bytes": table.is_bytes,
        "most_held": float(table.columns["held"].max(initial=0)),
        "kinds": [
            {
                "letter": kind.letter,
                "name": OPERATIONS[Op(kind)].label,
                "colours": {count: ramps[kind] for count, ramps in colours.items()},
                "inks": {count: [ink_on(colour) for colour in ramps[kind]] for count, ramps in colours.items()},
            }
            for kind in Kind
        ],
        "bars": [
            {"text": text, "name": NAMES[sort], "colour": COLOURS.get(sort, "ink")} for text, sort in table.bar_names
        ],
        "foot": FOOT,
        "themes": {name: {key: getattr(theme, key) for key in ("name", *VARIABLES)} for name, theme in THEMES.items()},
        "causes": [NAME_OF_CAUSE[cause] for cause in Cause],
        "lanes": [_lane(list(timelines), timeline_list, table, lane, main) for lane in range(len(table.lanes))],
        "columns": contents,
    }


def _lane(names: list[str], timelines: list[Timeline], table: BlockTable, index: int, main: str) -> dict[str, Any]:
    lane = table.lanes[index]
    timeline = timelines[lane.timeline]
    rank = lane.rank
    idle = format_share(idle_share(timeline, range(rank, rank + 1)))
    is_alone = len(timelines) == 1
    return {
        "name": f"rank {rank}" if is_alone else f"{rank} {names[lane.timeline]}",
        "full_name": f"rank {rank}" if is_alone else f"rank {rank} {names[lane.timeline]}",
        "figures": f"{idle} idle, peak {peak_microbatches(timeline, [rank])}",
        "first": lane.first,
        "count": lane.count,
        "first_bar": lane.first_bar,
        "num_bars": lane.num_bars,
        "begin": window_s(timeline)[0] / table.tick_s,
        "end": window_s(timeline)[1] / table.tick_s,
        "shades": num_shades(timeline.program),
        "is_pale": names[lane.timeline] != main,
        "colour": {
            name: to_hex(blend(theme.ranks, rank / max(timeline.num_ranks - 1, 1))) for name, theme in THEMES.items()
        },
    }


def read(name: str) -> str:
    """Return a file of the viewer."""
    return (VIEWER / name).read_text(encoding="utf-8").rstrip()


def fill(template: str, **texts: str) -> str:
    """Put texts in the places of their names, in one pass: names within a text stay as they are."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], read(template)) + "\n"


def bundle(modules: Sequence[str]) -> str:
    """Return modules of the viewer as one, for a page that has no server to import them from.

    It takes out lines of imports, also of types, and the word `export` at the beginning of a line, and nothing else.
    So modules come after those that they import from; an import is one line and renames nothing; and no two modules
    have a name in common.
    """
    return "\n".join(MODULE_SYNTAX.sub("", read(module)) for module in modules)
