"""Families on pages: nothing is lost, and everything fits the width."""

from dataclasses import replace

import pytest

from penstock.cli.pages import command, draw_example, family_page, family_section, table_page
from penstock.errors import ConfigError
from penstock.ir.grid import from_grid, to_grid
from penstock.schedules import FAMILIES, build
from penstock.tables import Screen

ALL = list(FAMILIES.values())


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


@pytest.mark.parametrize("family", ALL, ids=FAMILIES)
@pytest.mark.parametrize("width", [80, 120])
def test_a_drawing_is_cut_into_parts_that_fit_and_lose_nothing(family, width):
    ranks = family.example[0]
    drawing = draw_example(family)
    lines = family_page(family, drawing, [], Screen(width)).splitlines()
    parts = [line for line in lines if line.startswith("rank ") and ":" in line]

    assert max(map(len, parts)) <= width
    joined = [" ".join(line.partition(":")[2] for line in parts[rank::ranks]) for rank in range(ranks)]
    assert [line.split() for line in joined] == [line.partition(":")[2].split() for line in drawing.splitlines()]


@pytest.mark.parametrize("family", ALL, ids=FAMILIES)
@pytest.mark.parametrize("width", [60, 120])
def test_the_drawing_on_a_page_reads_back_as_the_schedule(family, width):
    drawing = draw_example(family)
    page = family_page(family, drawing, [], Screen(width))

    shown = page[page.index("rank 0:") : page.index("A column is")]

    assert from_grid(shown) == from_grid(drawing)


@pytest.mark.parametrize("family", ALL, ids=FAMILIES)
def test_the_command_of_a_family_draws_its_example(family, capsys):
    from penstock.cli.entry import main

    assert main(command(family).split()[1:]) == 0
    assert capsys.readouterr().out == draw_example(family) + "\n"


def test_the_section_in_markdown_holds_command_and_drawing_in_a_fence():
    family = FAMILIES["gpipe"]

    section = family_section(family, draw_example(family), family.options)

    assert section.startswith("### gpipe\n\nAll forwards, then all backwards.\n\n* source: GPipe")
    fence = section.split("```")[1].split("\n\n")
    assert fence[0].strip() == "penstock show gpipe --ranks 4 --microbatches 6"
    assert from_grid(fence[1]) == build("gpipe", ranks=4, microbatches=6)
    assert "* option backward_order: ascending or descending (default ascending): order of the" in section
    assert "recompute" not in section


def test_families_that_cut_microbatches_are_drawn_with_slices():
    family = FAMILIES["seq1f1b"]

    assert draw_example(family) == to_grid(build("seq1f1b", ranks=4, microbatches=6, slices=2))
    assert command(family).endswith(" --slices 2")


def test_an_example_that_a_family_refuses_is_told_in_its_place():
    family = replace(FAMILIES["dualpipe"], example=(3, 8))

    with pytest.raises(ConfigError) as refused:
        build("dualpipe", ranks=3, microbatches=8)
    assert draw_example(family) == str(refused.value)
    assert str(refused.value)[:20] in family_page(family, draw_example(family), [], Screen(120))
