"""The handbook: every family is in it, and its written parts are true."""

import re
import shlex
from dataclasses import replace

import pytest

from penstock.cli import handbook as written
from penstock.cli.handbook import (
    command,
    differences,
    draw_example,
    family_page,
    family_section,
    family_text,
    handbook,
    side_by_side,
    table_page,
)
from penstock.errors import ConfigError
from penstock.ir.grid import from_grid
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from penstock.simulation import Costs, simulate
from penstock.tables import Screen
from tests.house.source import ROOT
from tests.support.grids import assert_grid

ALL = list(FAMILIES.values())
TEXT = written.TEXT.read_text(encoding="utf-8")
EXAMPLE, OFFLOAD, PHASES, FUNCTION = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^\$ (penstock (?:show|compare) .*)", TEXT, re.MULTILINE)


def test_every_family_has_a_section_and_a_row_of_figures():
    page = handbook(ALL)

    assert re.findall(r"^### (.*)", page, re.MULTILINE)[: len(ALL)] == list(FAMILIES)
    figures = re.findall(r"^\| `([\w-]+)(?::slices=2)?` \| [\d.]+ s \|", page, re.MULTILINE)
    assert figures == [name for name in FAMILIES if name != "forward-only"]
    assert "<!--" not in page


@pytest.mark.slow
def test_a_family_that_refuses_the_size_has_its_reason_beside_its_name(monkeypatch):
    monkeypatch.setattr(written, "MICROBATCHES", 2)

    assert "| `dualpipe` | microbatches: dualpipe needs at least 2 microbatches per rank" in side_by_side(ALL)


def test_the_example_of_offloads_prints_what_it_says(capsys):
    exec(compile(OFFLOAD, "handbook.md", "exec"), {})

    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", OFFLOAD)


def test_differences_are_about_families_and_options_that_exist_and_stand_on_their_pages():
    about = re.findall(r"^\* `([\w-]+)`: ", TEXT, re.MULTILINE)

    assert len(about) > 5
    assert set(about) <= set(FAMILIES)
    for name in about:
        for text in differences(name):
            options = dict(re.findall(r"`(\w+)=(\w+)`", text)) | dict.fromkeys(re.findall(r"\(`(\w+)`\)", text), True)
            build(name, ranks=4, microbatches=8, **options)
    told = [text.split(":")[0][:10] for text in differences("interleaved-1f1b")]
    assert (told, differences("gpipe")) == (["any number", "groups bel", "as many mi"], [])
    family, [text, *_] = FAMILIES["looped-bfs"], differences("looped-bfs")
    page = family_text(family, screen=Screen(120), as_markdown=False)
    assert f"differs {text}" in " ".join(page.split())
    assert text in family_text(family, screen=Screen(120), as_markdown=True)


def test_the_table_of_recomputation_says_what_is_predicted():
    table = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (\d+) \| ([\d, ]+) \| ([\d, ]+) \|", TEXT, re.MULTILINE)

    assert len(table) == 3
    for name, *cells in table:
        both = [build(name, ranks=4, microbatches=8, recompute=again) for again in (False, True)]
        found = [f"{simulate(schedule, Costs.uniform()).makespan_s:g}" for schedule in both]
        found += [", ".join(map(str, check(schedule).peak_activations)) for schedule in both]
        assert found == cells


def test_the_examples_build_schedules_and_the_family_in_the_text_is_zb_h1_and_zb_h2():
    first, namespace = {}, {}
    exec(EXAMPLE, first)
    exec(PHASES, namespace)

    assert first["schedule"] == build("1f1b", ranks=4, microbatches=8, warmup="eager")
    assert namespace["schedule"] == build("zb-h2", ranks=4, microbatches=8)
    assert FUNCTION in (ROOT / "examples" / "own_schedule.py").read_text(encoding="utf-8")
    exec(FUNCTION, namespace)
    found = build(namespace["in_groups"], ranks=2, microbatches=4, size=2)
    assert_grid(found, "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3\n1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3")
    assert build(namespace["zb"], ranks=5, microbatches=7) == build("zb-h1", ranks=5, microbatches=7)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_in_the_text_run(line, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")

    assert "refused" not in printed(*shlex.split(line.partition(">")[0].partition("#")[0])[1:])


def squeezed(text):
    return "".join(text.split())


def test_a_pipe_gets_one_line_a_family_that_says_when_to_take_it():
    lines = table_page(ALL, Screen()).splitlines()

    assert [line.split()[0] for line in lines[2:-2]] == list(FAMILIES)
    assert all(line.endswith(family.advice) for line, family in zip(lines[2:-2], ALL, strict=True))
    assert lines[-1].startswith("penstock schedules NAME")


@pytest.mark.parametrize("width", [40, 80, 250])
def test_the_table_fits_a_terminal(width):
    page = table_page(ALL, Screen(width))

    assert max(map(len, page.splitlines())) <= width
    assert all(squeezed(family.summary)[:10] in squeezed(page) for family in ALL)
    assert ("left out at" in page) is (width < 250)


@pytest.mark.parametrize("family", ALL, ids=FAMILIES)
def test_the_page_of_a_family_says_all_about_it(family):
    page = family_page(family, draw_example(family), ["other than there"], Screen(120))

    assert page.startswith(f"{family.name}: {family.summary}\n\npenstock show {family.name} --ranks ")
    for text in (family.source, family.placement, family.restrictions, family.bubble, family.memory, family.advice):
        assert squeezed(text) in squeezed(page)
    for name, option in family.all_options.items():
        assert squeezed(f"option {name}") in squeezed(page)
        assert squeezed(f"(default {option.default}): {option.help}") in squeezed(page)
    assert "differs" in page
    assert "other than there" in page


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("family", [FAMILIES[name] for name in ("1f1b", "seq1f1b", "dualpipe", "zbv")])
def test_a_drawing_is_cut_into_parts_that_fit_lose_nothing_and_read_back_as_the_schedule(family, width):
    ranks = family.example[0]
    drawing = draw_example(family)
    page = family_page(family, drawing, [], Screen(width))
    parts = [line for line in page.splitlines() if line.startswith("rank ") and ":" in line]

    assert max(map(len, parts)) <= width
    joined = [" ".join(line.partition(":")[2] for line in parts[rank::ranks]) for rank in range(ranks)]
    assert [line.split() for line in joined] == [line.partition(":")[2].split() for line in drawing.splitlines()]
    assert from_grid(page[page.index("rank 0:") : page.index("A column is")]) == from_grid(drawing)


@pytest.mark.parametrize("family", ALL, ids=FAMILIES)
def test_the_command_of_a_family_draws_its_example(family, printed):
    assert printed(*command(family).split()[1:]) == draw_example(family) + "\n"


def test_the_section_in_markdown_holds_command_and_drawing_in_a_fence():
    family = FAMILIES["gpipe"]

    section = family_section(family, draw_example(family), family.options)

    assert section.startswith("### gpipe\n\nAll forwards, then all backwards.\n\n* source: GPipe")
    fence = section.split("```")[1].split("\n\n")
    assert fence[0].strip() == "penstock show gpipe --ranks 4 --microbatches 6"
    assert from_grid(fence[1]) == build("gpipe", ranks=4, microbatches=6)
    assert "* option backward_order: ascending or descending (default ascending): order of the" in section
    assert "recompute" not in section
    odd = replace(FAMILIES["dualpipe"], example=(3, 8))
    with pytest.raises(ConfigError) as refused:
        build("dualpipe", ranks=3, microbatches=8)
    assert draw_example(odd) == str(refused.value), "the reason stands in its place"
    assert str(refused.value)[:20] in family_page(odd, draw_example(odd), [], Screen(120))
