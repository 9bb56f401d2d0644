#!/usr/bin/env python
"""Draw the pictures of Start, All of Penstock, the tutorials, the cookbook and the recipes, for light and dark pages.

Usage: scripts/page_pictures.py [FOLDER]     Writes NAME-light.svg and NAME-dark.svg into docs/pictures, or FOLDER; the
same code gives the same bytes.
"""

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import penstock as ps  # noqa: E402
from penstock.cli.entry import main as penstock  # noqa: E402
from penstock.show.chart import timeline_chart  # noqa: E402

DOCS = ROOT / "docs"
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "pictures"
UNITS = ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1)
SLOW_NETWORK = ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1, transfer=0.25)
UNEVEN = ps.Costs(forward_s=(1, 2), backward_input_s=(1, 2), backward_weight_s=(1, 2))
HALVES = ps.Costs.uniform(forward=0.75, backward_input=0.75, backward_weight=0.75)
FRONT = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "interleaved-1f1b", "v-half", "v-min", "1f1b:recompute=true"]
COLORS = {
    "light": {"text": "#1f2328", "line": "#59636e", "fill": "#ddf4ff", "other": "#fff1e5"},
    "dark": {"text": "#f0f6fc", "line": "#9198a1", "fill": "#0c2d6b", "other": "#5a1e02"},
}


def draw(name, schedule, costs):
    """Draw a schedule's timeline under costs."""
    timeline = ps.simulate(schedule, costs)
    for theme in COLORS:
        (FOLDER / f"{name}-{theme}.svg").write_bytes(timeline_chart(timeline, theme=theme))


def draw_front(name, ranks, microbatches):
    """Draw step time against memory of some families, with the command that the page names."""
    for theme in COLORS:
        path = FOLDER / f"{name}-{theme}.svg"
        size = ["--ranks", str(ranks), "--microbatches", str(microbatches)]
        status = penstock(["compare", *FRONT, *size, "--theme", theme, "--output", str(path), "--force"])
        if status:
            sys.exit(status)


def function_of_page(page, file, name):
    """A function of a file that a page shows."""
    text = (DOCS / page).read_text(encoding="utf-8")
    code = re.search(rf"^<!-- file: {re.escape(file)} -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code[1], file, "exec"), names)
    return names[name]


def box(x, y, width, text, fill="fill"):
    """A box with a text in it, 34 high."""
    style = f'class="{fill}"'
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="34" rx="4" {style}/>'
        f'<text x="{x + width / 2}" y="{y + 22}" text-anchor="middle">{escape(text)}</text>'
    )


def arrow(path, text="", at=(0, 0), is_dashed=False):
    """A line with a head, and a text near it."""
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    label = f'<text x="{at[0]}" y="{at[1]}" text-anchor="middle" class="small">{escape(text)}</text>' if text else ""
    return f'<path d="{path}" class="line" marker-end="url(#head)"{dashes}/>{label}'


def draw_diagram(name, width, height, parts):
    """Write a diagram of boxes and arrows."""
    for theme, colors in COLORS.items():
        style = (
            f"text{{font:14px sans-serif;fill:{colors['text']}}}.small{{font-size:12px}}"
            f".line{{fill:none;stroke:{colors['line']};stroke-width:1.5}}"
            f".fill{{fill:{colors['fill']};stroke:{colors['line']}}}.other{{fill:{colors['other']};"
            f"stroke:{colors['line']}}}.frame{{fill:none;stroke:{colors['line']};stroke-dasharray:2 3}}"
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colors["line"]}"/></marker></defs>'
        )
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
        text = f"{opening}<style>{style}</style>{head}{''.join(parts)}</svg>\n"
        (FOLDER / f"{name}-{theme}.svg").write_text(text, encoding="utf-8")


def frame(x, y, width, height, text):
    """A dotted frame around what a rank holds, with its name on top."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="frame"/>'
        f'<text x="{x + 130}" y="{y + 20}" class="small">{escape(text)}</text>'
    )


def own_model():
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
    draw_diagram("own-model", 762, 184, parts)


def replicas():
    """Two pipelines whose ranks average their gradients by stage."""
    parts = []
    for replica in range(2):
        y = 30 + 110 * replica
        parts.append(f'<text x="10" y="{y + 22}">replica {replica}</text>')
        for stage in range(2):
            text = f"rank {2 * replica + stage}: stage {stage}"
            parts.append(box(110 + 250 * stage, y, 150, text, "other" if stage else "fill"))
        parts.append(arrow(f"M262,{y + 17} L356,{y + 17}", "microbatches", (309, y + 10)))
    for x in (185, 435):
        parts.append(arrow(f"M{x},66 L{x},138", is_dashed=True))
        parts.append(arrow(f"M{x},138 L{x},66", "average gradients", (x + 62, 106), is_dashed=True))
    draw_diagram("replicas", 570, 190, parts)


def main():
    """Draw all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("1f1b", "zb-h1"):
        draw(f"start-{name}", ps.build(name, ranks=4, microbatches=6), UNITS)
    draw("all-1f1b", ps.build("1f1b", ranks=4, microbatches=8), UNITS)
    draw_front("all-front", 4, 8)
    draw("custom-1f1b", ps.build("1f1b", ranks=4, microbatches=12), SLOW_NETWORK)
    relaxed = function_of_page("tutorials/custom_schedule.md", "relaxed.py", "relaxed")
    draw("custom-relaxed", ps.build(relaxed, ranks=4, microbatches=12), SLOW_NETWORK)
    draw("slow-before", ps.build("1f1b", ranks=2, microbatches=4), UNEVEN)
    draw("slow-after", ps.build("1f1b", ranks=2, microbatches=8), HALVES)
    own_model()
    replicas()


if __name__ == "__main__":
    main()
