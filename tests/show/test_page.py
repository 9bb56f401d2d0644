"""The page: self-contained, small, and the timeline comes back out of it; where node is, what its viewer answers."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.show.page import MAX_BLOCKS, MAX_BYTES, MODULES, bundle, fill, read, to_page
from penstock.show.palette import THEMES, style_of_themes
from penstock.simulation import Costs
from tests.show.test_block_table import unpack
from tests.show.timelines import COSTS, UNIT, paired_timeline, timeline_of, timeline_with_bars

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="needs node")
MAX_SCRIPT_LINES = 550
"""Without comments, most of which are types."""
CALL = re.compile(r'^start\((.*), "([A-Za-z0-9+/=]*)"\);$', re.MULTILINE)


def data_of(page):
    """The header of a page, and the text of its columns."""
    header, text = CALL.search(page.decode()).groups()
    return json.loads(header), text


def run_by_node(script):
    """The output of a module."""
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(*questions):
    """The answers of the viewer's functions to questions about `table`, each about that of a page."""
    asking = [
        f"{{ const header = {json.dumps(header)};"
        f"const table = makeTable(header, await unpack({json.dumps(text)}, header.columns));"
        f"answers.push({question}); }}"
        for (header, text), question in ((data_of(page), question) for page, question in questions)
    ]
    script = "\n".join([bundle(MODULES), "const answers = [];", *asking, "console.log(JSON.stringify(answers));"])
    return json.loads(run_by_node(script))


def imports_of(module):
    """(names, file) of every import of a module."""
    found = re.findall(r'^import \{ (.*) \} from "\./(.*)";$', read(module), re.MULTILINE)
    return [(names.split(", "), file) for names, file in found]


def test_the_page_holds_the_timeline():
    timeline = timeline_of(3, 5, "zbv")

    header, text = data_of(to_page({"predicted": timeline}))

    columns, tick_s = unpack(text, header["columns"]), header["tick_s"]
    rows = np.concatenate([timeline.compute_rows(rank) for rank in range(3)])
    assert columns["duration"] * tick_s == pytest.approx(timeline.end_s[rows] - timeline.start_s[rows])
    assert columns["stage"].tolist() == timeline.program.stage[rows].tolist()
    assert columns["microbatch"].tolist() == timeline.program.microbatch[rows].tolist()
    assert [lane["name"] for lane in header["lanes"]] == ["rank 0", "rank 1", "rank 2"]
    first = [lane["first"] for lane in header["lanes"]]
    assert columns["gap"][first] * tick_s == pytest.approx([0, 0.011, 0.022])


@pytest.mark.parametrize(("main", "pale"), [(None, [True, False]), ("a", [False, True]), ("b", [True, False])])
def test_all_but_the_main_timeline_are_pale(main, pale):
    timeline = timeline_of(1, 2, "sequential")

    header, _ = data_of(to_page({"a": timeline, "b": timeline}, main=main))

    assert [lane["is_pale"] for lane in header["lanes"]] == pale


def test_the_page_needs_no_network_and_holds_the_modules_as_one():
    page = to_page({"predicted": timeline_of(2, 4)}).decode()

    assert "default-src 'none'" in page
    assert not re.findall(r"https?://|//\w+\.\w+/|@import|url\(|<link|<img|<iframe|src=|fetch\(|XMLHttp|import\(", page)
    script = page[page.index('<script type="module">') : page.index("</script>")]
    assert not re.findall(r"^(?:import|export)\b", script, re.MULTILINE)
    assert all(f"function {name}(" in script for name in ("unpack", "drawAll", "start"))


def test_the_page_tells_its_figures_and_legend_as_text():
    page = to_page({"predicted": timeline_with_bars()}, more={"gap": "3 %"}).decode()

    text = unescape(re.sub(r"<[^>]*>", " ", page[page.index("<header>") : page.index("</header>")]))
    assert " ".join(text.split()) == (
        "1f1b, 2 ranks, 2 microbatches, predicted makespan 9.00 s span 9.00 s bubble fraction 33.3 % "
        "peak 2 microbatches gap 3 % F forward B backward bubble collective optimizer step"
    )


def test_the_page_follows_the_browser_unless_told_otherwise():
    timeline = timeline_of(1, 1)

    assert b'<html lang="en">' in to_page({"predicted": timeline})
    assert b'<html lang="en" data-theme="dark">' in to_page({"predicted": timeline}, theme="dark")
    with pytest.raises(ConfigError, match="theme"):
        to_page({"predicted": timeline}, theme="blue")


def test_names_cannot_end_the_script_or_become_markup():
    page = to_page({"</script><b>": timeline_of(1, 1), "other": timeline_of(1, 1)}, title="<i> & {{data}}").decode()

    assert page.count("</script>") == 1
    assert "<b>" not in page
    assert "<h1>&lt;i&gt; &amp; {{data}}</h1>" in page
    assert data_of(page.encode())[0]["lanes"][0]["name"] == "0 </script><b>"


@pytest.mark.parametrize("shape", [(16, 128), pytest.param((64, 512), marks=pytest.mark.slow)])
def test_a_large_timeline_is_a_small_page(shape):
    timeline = timeline_of(*shape)

    page = to_page({"predicted": timeline})

    num_blocks = timeline.program.is_compute.sum()
    assert num_blocks < MAX_BLOCKS
    assert len(page) < 40_000 + 8 * num_blocks < MAX_BYTES


def test_pages_that_would_be_too_large_are_refused_with_a_fix():
    message = (
        r"format: 16 computations need 0\.\d+ MB, which is more than a page holds \(0\.001 MB\); show fewer .* SVG"
    )

    with pytest.raises(ConfigError, match=message):
        to_page({"predicted": timeline_of(2, 4)}, max_bytes=1000)


def tip(title, *lines, more=()):
    return {"title": title, "lines": [*lines], "more": [*more]}


PLAIN, PAIRED = timeline_of(2, 2, costs=UNIT), paired_timeline()
WITH_TRANSFERS = timeline_of(2, 2, costs=Costs.uniform(transfer=0.25))
TWO = {"predicted": timeline_of(2, 2), "measured": timeline_of(2, 2, costs=COSTS)}
ANSWERS = {
    "what a block is and what it waited for": (
        {"predicted": WITH_TRANSFERS}, "[0, 2, 5].map((block) => describe(table, block))",
        [
            tip(
                "0F0 forward", "rank 0, stage 0, microbatch 0", "0 s to 1 s, takes 1 s",
                "memory of the rank: 1 microbatch", more=["no idle time before it"],
            ),
            tip(
                "0B0 backward", "rank 0, stage 0, microbatch 0", "4.5 s to 6.5 s, takes 2 s",
                "memory of the rank: 2 microbatches",
                more=[
                    "2.5 s idle before it:", "2.25 s dependency", "250 ms transfer",
                    "the message of 1B0 came last, after 250 ms",
                ],
            ),
            tip(
                "1B0 backward", "rank 1, stage 1, microbatch 0", "2.25 s to 4.25 s, takes 2 s",
                "memory of the rank: 1 microbatch", more=["no idle time before it"],
            ),
        ],
    ),
    "blocks and bubbles at moments": (
        {"predicted": PLAIN},
        "[0.5, 1, 3, 6.5, 20].map((s) => find(table, 0, s / table.tick_s, 0.2))"
        ".map((found) => [found.block ?? -1, found.tip?.title])",
        [[0, "0F0 forward"], [1, "0F1 forward"], [-1, "bubble before 0B0"], [-1, "bubble before 0B1"], [-1, None]],
    ),
    "halves of a pair": (
        {"predicted": PAIRED}, "[0.2, 0.7].map((down) => find(table, 0, 2 / table.tick_s, down).block)", [1, 2],
    ),
    "bars at the foot of their lane, and the idle time behind the last block": (
        {"predicted": timeline_with_bars()},
        "[[8, 0.9], [8, 0.5], [10, 0.9]].map(([s, down]) => find(table, 1, s / table.tick_s, down).tip)",
        [
            tip("1REDUCE_TIED0 collective", "rank 1", "7 s to 9.5 s, takes 2.5 s"),
            tip("bubble after 1B1", "rank 1", "7 s to 9 s, takes 2 s", more=["2 s synchronisation"]),
            tip("1STEP optimizer step", "rank 1", "9.5 s to 11.5 s, takes 2 s"),
        ],
    ),
    "the text of a slice": (
        {"predicted": timeline_of(2, 2, "seq1f1b", slices=2)}, "[0, 1].map((block) => textOf(table, block))",
        ["0F0", "0F0.1"],
    ),
    "the other of a pair": ({"predicted": PAIRED}, "describe(table, 1).lines[3]", "overlaps with 0B0"),
    "what a bubble is": (
        {"predicted": PLAIN}, "describeBubble(table, 0, 2)",
        tip(
            "bubble before 0B0", "rank 0", "2 s to 4 s, takes 2 s",
            more=["2 s dependency", "the message of 1B0 came last, after 0 s"],
        ),
    ),
    "lanes of two timelines": (
        TWO, "table.lanes.slice(2).map((lane) => [lane.name, lane.full_name, lane.is_pale])",
        [["1 predicted", "rank 1 predicted", True], ["1 measured", "rank 1 measured", False]],
    ),
    "the lane of a block": (TWO, "[0, 4, 8, 15].map((block) => laneOf(table, block))", [0, 1, 2, 3]),
}  # fmt: skip


@needs_node
def test_the_viewer_says_what_is_where():
    questions = [(to_page(timelines, costs={"predicted": UNIT}), text) for timelines, text, _ in ANSWERS.values()]

    answers = dict(zip(ANSWERS, asked(*questions), strict=True))
    assert answers == {name: answer for name, (_, _, answer) in ANSWERS.items()}


@needs_node
@pytest.mark.slow
def test_the_curves_of_memory_that_are_predicted_are_fainter_than_those_that_were_measured():
    """By a pen that notes with which alpha it strokes the wide lines of the curves."""
    timeline = timeline_of(2, 2)
    page = to_page({"measured": timeline, "predicted": timeline})

    question = """(() => {
          const alphas = [];
          const noted = { globalAlpha: 1, measureText: () => ({ width: 1 }) };
          noted.stroke = () => { if (noted.lineWidth === 1.6) alphas.push(noted.globalAlpha); };
          const pen = new Proxy(noted, { get: (kept, name) => name in kept ? kept[name] : () => {} });
          globalThis.window = { devicePixelRatio: 1 };
          const canvas = { clientWidth: 900, clientHeight: 600, getContext: () => pen };
          const view = { from: 0, to: table.end_ticks, tallness: 1, scroll: 0 };
          drawAll(table, canvas, { view, lane: -1, marked: -1 }, table.themes.light ?? table.themes[0]);
          return [alphas, table.lanes.map((lane) => lane.is_pale)];
        })()"""
    [[alphas, are_pale]] = asked((page, question))

    assert sorted(are_pale) == [False, False, True, True]
    assert alphas == [0.45 if is_pale else 1 for is_pale in are_pale]


def test_the_causes_go_by_the_costs_of_the_prediction():
    costs = Costs.uniform(forward=1.0)
    timeline = timeline_of(2, 1, costs=replace(costs, forward_s=(1.0, 3.0)))

    def causes(**known):
        header, text = data_of(to_page({"predicted": timeline}, **known))
        return {header["causes"][cause] for cause in unpack(text, header["columns"])["idle_cause"].tolist()}

    assert causes() == {"dependency", "imbalance", "synchronisation"}
    assert causes(costs={"predicted": costs}) == {"dependency", "straggler", "synchronisation"}


def test_the_viewer_stays_small():
    lines = [line for module in MODULES for line in read(module).splitlines()]

    assert sum(not re.match(r"\s*(//|/\*\*|\*)", line) for line in lines) <= MAX_SCRIPT_LINES
    assert max(map(len, lines)) <= 120


def test_modules_import_only_what_modules_before_them_export():
    assert {module: imports_of(module) for module in MODULES}["data.js"] == []
    for number, module in enumerate(MODULES):
        text = read(module)
        assert text.count("\nimport ") == len(imports_of(module))
        for names, file in imports_of(module):
            assert file in MODULES[:number]
            exported = set(re.findall(r"^export (?:async )?(?:function|const) (\w+)", read(file), re.MULTILINE))
            lists = re.findall(r"^export const \[(.*?)\]", read(file), re.MULTILINE)
            assert set(names) <= exported.union(*(found.split(", ") for found in lists))
            assert all(len(re.findall(rf"\b{name}\b", text)) > 1 for name in names)


PLACES = ("attributes", "title", "style", "figures", "legend", "notes", "label", "script", "header", "data")


def test_a_text_that_looks_like_a_place_stays_as_it_is_and_one_that_is_missing_is_found_out():
    page = fill("page.html", **dict.fromkeys(PLACES, "") | {"title": "{{data}}"})

    assert "<h1>{{data}}</h1>" in page
    with pytest.raises(KeyError):
        fill("page.html", title="alone")


def test_every_theme_has_its_colours_which_the_style_sheet_uses_and_dark_browsers_get_the_dark_one():
    light, dark, *named = style_of_themes()

    assert THEMES["light"].bubble in light
    assert dark.startswith("@media (prefers-color-scheme: dark)")
    assert THEMES["dark"].bubble in dark
    assert [rule.partition(" ")[0] for rule in named] == [':root[data-theme="light"]', ':root[data-theme="dark"]']
    known = style_of_themes()[0]
    used = {word.partition(")")[0] for word in read("style.css").split("var(")[1:]}
    assert used
    assert all(f"{variable}:" in known for variable in used)
