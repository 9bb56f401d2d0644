"""`penstock schedules`."""

import pytest

from penstock.cli.entry import main
from penstock.cli.handbook import handbook, table_page
from penstock.schedules import FAMILIES
from penstock.tables import Screen
from tests.support.plug_ins import ZIGZAG, installing

ALL = list(FAMILIES.values())


@pytest.fixture
def install(tmp_path, monkeypatch):
    with installing(tmp_path, monkeypatch) as install:
        yield install


def test_without_a_name_every_family_has_its_line(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    assert printed("schedules") == table_page(ALL, Screen()) + "\n"


def test_a_name_tells_all_about_a_family(printed):
    page = printed("schedules", "1f1b")

    assert page.startswith(
        "1f1b: one forward and one backward in turn\n\npenstock show 1f1b --ranks 4 --microbatches 6\n"
    )
    assert "\nrank 3: .   .   .   3F0 3B0 =   3F1 " in page
    assert "\noption warmup     standard or eager (default standard): " in page


@pytest.mark.slow
def test_the_handbook_is_all_in_markdown(printed):
    assert printed("schedules", "--to", "markdown") == handbook(ALL)
    assert printed("schedules", "1f1b", "--to", "markdown").startswith("### 1f1b\n")


def test_an_unknown_name_is_refused_with_the_nearest(refused):
    assert "no schedule '1f2b'; known: " in refused("schedules", "1f2b")


@pytest.mark.slow
def test_families_of_other_distributions_stand_there_too(printed, install):
    install("my-schedules", ["zigzag = zig:FAMILY"], zig=ZIGZAG)

    assert "\nzigzag " in printed("schedules")
    assert printed("schedules", "zigzag").startswith("zigzag: forward, backward, in turn\n")
    assert "### zigzag\n" in printed("schedules", "--to", "markdown")


def test_a_broken_plug_in_is_told_in_one_line_beside_the_table(capsys, install, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    install("my-schedules", ["zigzag = nowhere:FAMILY"])

    assert main(["schedules"]) == 0
    said, complained = capsys.readouterr()
    assert said == table_page(ALL, Screen()) + "\n"
    assert complained.startswith("penstock: plug-in 'zigzag' of my-schedules failed: ModuleNotFoundError: ")
    assert complained.count("\n") == 1
