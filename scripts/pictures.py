#!/usr/bin/env python
"""Draw the pictures of README.md and docs/ into docs/pictures/, each as NAME-light.svg and NAME-dark.svg.

Usage: scripts/pictures.py [--output FOLDER] [NAME ...]     Without names, all. The same code gives the same bytes.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import penstock as ps  # noqa: E402
from penstock.cli.entry import main as penstock  # noqa: E402
from penstock.cli.searched import LimitResult, combined, rows_to_picture, to_picture  # noqa: E402
from penstock.ir.timeline import Timeline  # noqa: E402
from penstock.proofs import Limit  # noqa: E402
from penstock.show.caption import add_legend, add_title, name_ranks  # noqa: E402
from penstock.show.chart import timeline_chart  # noqa: E402
from penstock.show.figures import describe_shape, idle_share  # noqa: E402
from penstock.show.lanes import Detail, Lane, TimeScale, draw_lanes  # noqa: E402
from penstock.show.palette import THEMES, Theme  # noqa: E402
from penstock.show.picture import picture_of  # noqa: E402
from penstock.show.sheet import Sheet  # noqa: E402
from penstock.show.text import format_seconds, format_share  # noqa: E402
from penstock.simulation.costs.file import load_costs  # noqa: E402

DOCS = ROOT / "docs"
WIDTH, LANE, TOP, HEADING, BOTTOM = 11.0, 0.34, 1.0, 0.45, 0.5
"""Inches: of the drawing, of a lane, of the title and the legend, above each timeline, and below the last one."""

UNITS = ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1)
SLOW_NETWORK = ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1, transfer=0.25)
UNEVEN = ps.Costs(forward_s=(1, 2), backward_input_s=(1, 2), backward_weight_s=(1, 2))
HALVES = ps.Costs.uniform(forward=0.75, backward_input=0.75, backward_weight=0.75)
FRONT = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "interleaved-1f1b", "v-half", "v-min", "1f1b:recompute=true"]

SEARCH_LIMIT, SEARCH_LIMITS = "14.25GiB", ("11 GiB", "13 GiB", "15 GiB", "17 GiB", "19 GiB", "21 GiB")
EVALUATIONS = 1_000_000
"""Of a search: with a number of them instead of seconds it finds the same each time."""

FILLS = {"light": ("#ddf4ff", "#fff1e5"), "dark": ("#0c2d6b", "#5a1e02")}
"""Of the two kinds of boxes in diagrams."""


# ---- timelines


def readme(theme: Theme) -> bytes:
    """The same model and batch under 1F1B and under ZB-V."""
    timelines = {name: timeline_of(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv")}
    title = "One model and one batch on 4 ranks, under two schedules"
    note = "numbers are microbatches; grey: the rank waits; F, I and W take equal time, B = I + W"
    return stacked(timelines, theme, title, note)


def timeline_of(family: str, *, ranks: int, microbatches: int) -> Timeline:
    """Simulate a schedule; the stages of a rank share its work, so that families can be compared."""
    schedule = ps.build(family, ranks=ranks, microbatches=microbatches)
    share = ranks / schedule.num_stages
    costs = ps.Costs.uniform(forward=share, backward_input=share, backward_weight=share)
    return ps.simulate(ps.lower(schedule), costs)


def stacked(timelines: dict[str, Timeline], theme: Theme, title: str, note: str) -> bytes:
    """Draw timelines one below the other on one axis of time."""
    heights = [LANE * timeline.num_ranks for timeline in timelines.values()]
    total = TOP + sum(HEADING + height for height in heights) + BOTTOM
    sheet = Sheet.of(WIDTH, total, theme, "svg")
    add_title(sheet, title, note, [])
    add_legend(sheet, list(timelines.values()))
    scale = TimeScale.of(max(timeline.makespan_s for timeline in timelines.values()))
    below_top = TOP
    for (name, timeline), height in zip(timelines.items(), heights, strict=True):
        sheet.write(f"{name}: {describe(timeline)}", below_top + HEADING - 0.15, size=11, is_bold=True)
        below_top += HEADING + height
        axes = sheet.add_axes(total - below_top, height)
        draw(axes, timeline, scale, sheet)
        axes.tick_params(axis="x", labelbottom=name == list(timelines)[-1])
    axes.set_xlabel(f"time ({scale.name})", fontsize=9, color=theme.ink)
    return sheet.to_bytes()


def describe(timeline: Timeline) -> str:
    """Return its duration, its idle share, and the most microbatches that a rank keeps activations of."""
    peak = max(timeline.peak_activations) * timeline.num_ranks / timeline.program.num_stages
    idle = format_share(timeline.bubble_fraction)
    return f"{format_seconds(timeline.makespan_s)}, ranks wait {idle} of it; at most {peak:g} microbatches in memory"


def draw(axes: Any, timeline: Timeline, scale: TimeScale, sheet: Sheet) -> None:
    """Draw one lane per rank, with its idle share at its right."""
    num_ranks = timeline.num_ranks
    lanes = [Lane(timeline, range(rank, rank + 1), num_ranks - rank - 0.92, 0.84) for rank in range(num_ranks)]
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, num_ranks)
    axes.spines["left"].set_visible(False)
    draw_lanes(axes, lanes, scale, sheet, Detail.NUMBERED)
    name_ranks(axes, lanes, sheet)
    for lane in lanes:
        share = format_share(idle_share(timeline, lane.ranks))
        axes.annotate(
            f"{share} idle", (1.0, lane.middle), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", fontsize=8, color=sheet.theme.ink, va="center",
        )  # fmt: skip


def chart(family: str | Callable[..., Any], ranks: int, microbatches: int, costs: ps.Costs, theme: Theme) -> bytes:
    """Draw one schedule under costs, as `penstock show --output` does."""
    schedule = ps.build(family, ranks=ranks, microbatches=microbatches)
    return timeline_chart(ps.simulate(schedule, costs), theme=theme.name)


def encoder_and_decoder(theme: Theme) -> bytes:
    """The chain of docs/recipes/several_models.md."""
    encoder, decoder = (ps.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zb-h1"))
    return timeline_chart(ps.simulate(ps.chain(encoder, decoder), UNITS), theme=theme.name)


def front(theme: Theme) -> bytes:
    """Step time against memory of some families, by the command that docs/all.md names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "front.svg"
        words = ["--ranks", "4", "--microbatches", "8", "--theme", theme.name, "--output", str(path)]
        if status := penstock(["compare", *FRONT, *words]):
            sys.exit(status)
        return path.read_bytes()


def relaxed(theme: Theme) -> bytes:
    """The schedule that the tutorial writes, from the tutorial's own text."""
    text = (DOCS / "tutorials" / "custom_schedule.md").read_text(encoding="utf-8")
    code = re.search(r"^<!-- file: relaxed.py -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if code is None:
        sys.exit("docs/tutorials/custom_schedule.md shows no file relaxed.py")
    names: dict[str, Any] = {}
    exec(compile(code[1], "relaxed.py", "exec"), names)
    return chart(names["relaxed"], 4, 12, SLOW_NETWORK, theme)


# ---- searches


def before_search(theme: Theme) -> bytes:
    """1F1B under the costs of docs/searching.md, as `penstock show` draws it."""
    costs = costs_of_search()
    timeline = ps.simulate(ps.lower(ps.build("1f1b", ranks=4, microbatches=12)), costs)
    title = f"{describe_shape(timeline.program)}, predicted with costs.toml"
    return picture_of(timeline, "svg", costs=costs, title=title, theme=theme.name)


def after_search(theme: Theme) -> bytes:
    """What a search finds for the same, as `penstock search` draws it."""
    limit, names = Limit.read(SEARCH_LIMIT), {"costs_text": "costs.toml", "format": "svg", "theme": theme.name}
    return to_picture(searched(SEARCH_LIMIT), limit=limit, **names)


def searched_front(theme: Theme) -> bytes:
    """Step time against memory of searches within several limits, as `penstock search --sweep` draws it."""
    rows = combined([LimitResult(Limit.read(limit), searched(limit)) for limit in SEARCH_LIMITS])
    shape = {"rank": 4, "microbatch": 12}
    return rows_to_picture(rows, shape, costs_text="costs.toml", format="svg", theme=theme.name)


@cache
def searched(limit: str) -> Any:
    """Search within a limit under the costs of docs/searching.md."""
    return ps.search(costs_of_search(), 4, 12, memory_limit=limit, evaluations=EVALUATIONS)


@cache
def costs_of_search() -> Any:
    """The costs of the example in docs/searching.md, from its own text."""
    text = (DOCS / "searching.md").read_text(encoding="utf-8")
    toml = re.search(r"^<!-- file: costs.toml -->\n```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if toml is None:
        sys.exit("docs/searching.md shows no file costs.toml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.toml"
        path.write_text(toml[1], encoding="utf-8")
        return load_costs(str(path))


# ---- diagrams of boxes and arrows


def diagram(width: int, height: int, parts: list[str], theme: Theme) -> bytes:
    """Return an SVG of the parts."""
    fill, other = FILLS[theme.name]
    style = (
        f"text{{font:14px sans-serif;fill:{theme.ink}}}.small{{font-size:12px}}"
        f".line{{fill:none;stroke:{theme.faint};stroke-width:1.5}}"
        f".fill{{fill:{fill};stroke:{theme.faint}}}.other{{fill:{other};stroke:{theme.faint}}}"
        f".frame{{fill:none;stroke:{theme.faint};stroke-dasharray:2 3}}"
    )
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{theme.faint}"/></marker></defs>'
    )
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    return f"{opening}<style>{style}</style>{head}{''.join(parts)}</svg>\n".encode()


def box(x: float, y: float, width: float, text: str, fill: str = "fill") -> str:
    """A box with a text in it, 34 high."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="34" rx="4" class="{fill}"/>' + write(
        x + width / 2, y + 22, text, "", "middle"
    )


def write(x: float, y: float, text: str, size: str = "small", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{size}">{escape(text)}</text>'


def arrow(path: str, text: str = "", at: tuple[float, float] = (0, 0), *, is_dashed: bool = False) -> str:
    """A line with a head, and a text near it."""
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    line = f'<path d="{path}" class="line" marker-end="url(#head)"{dashes}/>'
    return line + (write(*at, text, anchor="middle") if text else "")


def frame(x: float, y: float, width: float, height: float, text: str) -> str:
    """A dotted frame around what a rank holds, with its name on top."""
    outline = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="frame"/>'
    return outline + write(x + width / 2, y + 20, text, anchor="middle")


def own_model(theme: Theme) -> bytes:
    """The layers of the tutorial's model on two ranks."""
    names = ["Start", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "End"]
    parts = [frame(10, 50, 360, 80, "rank 0, stage 0"), frame(390, 50, 360, 80, "rank 1, stage 1")]
    for number, name in enumerate(names):
        x = 22 + 118 * number + 26 * (number > 2)
        parts.append(box(x, 80, 98, name, "other" if number in (0, 5) else "fill"))
        if number:
            parts.append(arrow(f"M{x - 20 - 26 * (number == 3)},97 L{x - 2},97"))
    parts.append(arrow("M71,78 C90,8 650,8 686,76", "ps.Skip: the embedded tokens", (380, 20)))
    parts.append(arrow("M71,116 C90,180 650,180 686,118", "one tied weight", (380, 150), is_dashed=True))
    return diagram(762, 184, parts, theme)


def replicas(theme: Theme) -> bytes:
    """Two pipelines whose ranks average their gradients by stage."""
    parts = []
    for replica in range(2):
        y = 30 + 110 * replica
        parts.append(write(10, y + 22, f"replica {replica}", ""))
        for stage in range(2):
            text = f"rank {2 * replica + stage}: stage {stage}"
            parts.append(box(110 + 250 * stage, y, 150, text, "other" if stage else "fill"))
        parts.append(arrow(f"M262,{y + 17} L356,{y + 17}", "microbatches", (309, y + 10)))
    for x in (185, 435):
        parts.append(arrow(f"M{x},66 L{x},138", is_dashed=True))
        parts.append(arrow(f"M{x},138 L{x},66", "sum gradients", (x + 50, 106), is_dashed=True))
    return diagram(570, 190, parts, theme)


def additions(theme: Theme) -> bytes:
    """Which order of additions gives the bits of one process."""
    parts = [write(10, 26, "one process, and a stage that visits its microbatches in order: the same bits", "")]
    for microbatch in range(4):
        x = 10 + 120 * microbatch
        parts.append(box(x, 44, 90, f"gradient {microbatch}"))
        parts += [write(x + 98, 66, "+", "")] if microbatch < 3 else [arrow(f"M{x + 94},61 L{x + 128},61")]
    parts += [box(500, 44, 130, "((0+1)+2)+3"), write(10, 124, "two directions, as in dualpipe: equal to rounding", "")]
    for direction in range(2):
        y = 140 + 48 * direction
        for place in range(2):
            fill = "other" if direction else "fill"
            parts.append(box(10 + 120 * place, y, 90, f"gradient {2 * direction + place}", fill))
        parts += [write(108, y + 22, "+", ""), arrow(f"M224,{y + 17} C360,{y + 17} 400,181 496,181")]
    return diagram(640, 236, [*parts, box(500, 164, 130, "(0+1)+(2+3)", "other")], theme)


def circular_wait(theme: Theme) -> bytes:
    """Two ranks that both send first, and the order that lowering gives them."""
    parts = []
    for x, title, second, fill in (
        (10, "each rank sends first", ["send B0", "receive F1"], "other"),
        (410, "both ranks have one order", ["receive F1", "send B0"], "fill"),
    ):
        parts += [write(x, 24, title, ""), write(x, 48, "rank 0"), write(x + 220, 48, "rank 1")]
        for row, (own, peers) in enumerate(zip(["send F1", "receive B0"], second, strict=True)):
            parts += [box(x, 58 + 56 * row, 130, own, fill), box(x + 220, 58 + 56 * row, 130, peers, fill)]
    parts += [arrow("M142,75 L226,128"), arrow("M228,75 L144,128")]  # each send to the receive that it needs
    parts += [arrow("M542,75 L626,75"), arrow("M628,131 L544,131")]
    parts.append(write(10, 172, "without a buffer each send waits for a receive that"))
    parts.append(write(10, 188, "comes after the other send: both ranks wait for ever"))
    parts.append(write(410, 172, "each message is posted at the same place at both"))
    parts.append(write(410, 188, "ends: no cycle, with or without buffers"))
    return diagram(770, 200, parts, theme)


def split_backward(theme: Theme) -> bytes:
    """What `I` computes and keeps, and what `W` makes of it."""
    parts = [
        box(300, 20, 180, "I: input gradient", "other"),
        box(300, 130, 180, "W: weight gradient", "other"),
        arrow("M520,37 L482,37"),
        write(524, 32, "gradient of the"),
        write(524, 48, "stage's output"),
        arrow("M298,37 L212,37", "at once", (255, 30)),
        box(10, 20, 200, "previous stage's backward"),
        arrow("M390,56 L390,128"),
        write(400, 88, "kept until W: of each product, the"),
        write(400, 104, "activations and the output gradient"),
        arrow("M298,147 L212,147", "any time later", (255, 140)),
        box(10, 130, 200, ".grad, for the optimizer"),
    ]
    return diagram(710, 180, parts, theme)


def step(theme: Theme) -> bytes:
    """What the ranks do in one step."""
    parts = []
    columns = [(130, "agree"), (290, "run the program"), (450, "exchange losses"), (610, "return")]
    for rank in range(2):
        y = 30 + 90 * rank
        parts.append(write(10, y + 22, f"rank {rank}", ""))
        for number, (x, text) in enumerate(columns):
            parts.append(box(x - 50, y, 130, text, "fill" if number in (1, 3) else "other"))
            parts += [arrow(f"M{x + 82},{y + 17} L{x + 108},{y + 17}")] if number < 3 else []
    for x, text in ((145, "mode, layout, digests"), (465, "or one failure for all")):
        parts += [arrow(f"M{x},66 L{x},118"), arrow(f"M{x},118 L{x},66", text, (x, 174))]
    parts += [arrow("M290,66 L290,118"), arrow("M320,118 L320,66", "activations, gradients", (305, 174))]
    return diagram(700, 184, parts, theme)


def devices(theme: Theme) -> bytes:
    """One microbatch on a rank in the middle that takes a mask: what the host queues, and on which stream it runs."""
    lanes = {"host": 40, "copies of masks": 110, "current stream": 180, "from lower ranks": 250, "to higher ranks": 320}
    parts = [write(10, y + 22, name, "") for name, y in lanes.items()]
    parts += [f'<path d="M140,{y + 17} L760,{y + 17}" class="line"/>' for y in lanes.values()]
    host, copies, current, lower, higher = lanes.values()
    parts += [box(150, host, 110, "post receive"), box(275, host, 80, "queue F0"), box(370, host, 90, "post send")]
    parts += [box(475, host, 100, "copy for F1"), box(590, host, 130, "goes on to F1")]
    parts += [box(190, lower, 150, "receive of F0", "other"), box(360, current, 240, "F0", "other")]
    parts += [box(615, higher, 130, "send of F0", "other"), box(640, current, 110, "F1", "other")]
    parts += [box(190, copies, 110, "copy for F0", "other"), box(490, copies, 110, "copy for F1", "other")]
    parts += [arrow(f"M302,{copies + 17} L372,{current - 2}"), arrow(f"M602,{copies + 17} L655,{current - 2}")]
    parts += [arrow(f"M342,{lower + 10} L400,{current + 36}"), arrow(f"M585,{current + 36} L630,{higher - 2}")]
    parts.append(write(345, lower + 52, "F0 waits for its message"))
    parts.append(write(620, lower + 35, "the send waits for F0"))
    parts.append(write(150, 24, "run_ahead=N: the host is at most N computations ahead of the stream"))
    return diagram(780, 370, parts, theme)


def moving(theme: Theme) -> bytes:
    """Code for another system, its adapter, and what is below it."""
    systems = ["torch.distributed.pipelining", "Megatron-LM", "DeepSpeed", "torchtitan", "DualPipe"]
    parts = [write(10, 20, "your code, written for")]
    for number, system in enumerate(systems):
        y = 30 + 44 * number
        parts += [box(10, y, 220, system), arrow(f"M232,{y + 17} L288,{118 + 8 * (number - 2) + 17}")]
    parts += [box(290, 118, 150, "an adapter", "other"), arrow("M442,135 L478,135")]
    parts += [write(290, 168, "penstock.moving"), box(480, 118, 150, "ps.Pipeline", "other")]
    parts.append(write(480, 168, "its `pipeline` attribute"))
    return diagram(650, 250, parts, theme)


def peers(theme: Theme) -> bytes:
    """The steps of the systems that docs/performance.md compares, from its own table."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w-]+) \| ([\d.]+) \(.*?\) \| ([\d.]+) \(.*?\) \|", page, re.MULTILINE)
    if not rows:
        sys.exit("docs/performance.md has no table of systems")
    parts = []
    for column, title in enumerate(("emulated work, 4 ranks", "decoder, 2 ranks")):
        x = 250 + 300 * column
        longest = max(float(row[2 + column]) for row in rows)
        parts.append(write(x, 20, f"ms a step, {title}", ""))
        for number, (system, schedule, *steps) in enumerate(rows):
            y, width = 32 + 26 * number, 220 * float(steps[column]) / longest
            fill = "other" if system == "Penstock" else "fill"
            parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="18" class="{fill}"/>')
            parts.append(write(x + width + 6, y + 14, steps[column]))
            parts += [write(10, y + 14, f"{system}, {schedule}")] if not column else []
    return diagram(840, 40 + 26 * len(rows), parts, theme)


PICTURES: dict[str, Callable[[Theme], bytes]] = {
    "readme": readme,
    "start-1f1b": lambda theme: chart("1f1b", 4, 6, UNITS, theme),
    "start-zb-h1": lambda theme: chart("zb-h1", 4, 6, UNITS, theme),
    "all-1f1b": lambda theme: chart("1f1b", 4, 8, UNITS, theme),
    "all-front": front,
    "custom-1f1b": lambda theme: chart("1f1b", 4, 12, SLOW_NETWORK, theme),
    "custom-relaxed": relaxed,
    "search-before": before_search,
    "search-after": after_search,
    "search-front": searched_front,
    "slow-before": lambda theme: chart("1f1b", 2, 4, UNEVEN, theme),
    "slow-after": lambda theme: chart("1f1b", 2, 8, HALVES, theme),
    "chain": encoder_and_decoder,
    "own-model": own_model,
    "replicas": replicas,
    "additions": additions,
    "circular-wait": circular_wait,
    "split-backward": split_backward,
    "step": step,
    "devices": devices,
    "moving": moving,
    "peers": peers,
}
"""By the name of the file."""


def main() -> int:
    """Write the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="default: docs/pictures")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PICTURES):
        parser.error(f"unknown picture {sorted(unknown)[0]!r}; expected one of {', '.join(PICTURES)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or PICTURES:
        for theme in THEMES.values():
            (arguments.output / f"{name}-{theme.name}.svg").write_bytes(PICTURES[name](theme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
