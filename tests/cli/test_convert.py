"""`penstock convert`."""

import io
import os
import sys

import pytest

from penstock.cli.entry import main
from penstock.ir.action import Action, Kind
from penstock.ir.formats.deepspeed import to_deepspeed
from penstock.ir.grid import to_grid
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build

SCHEDULE = build("1f1b", ranks=2, microbatches=3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, where the command runs, with a schedule `in.csv`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text(SCHEDULE.to_csv())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "formats", "expected"),
    [
        ("out.csv", "", SCHEDULE.to_csv()),
        ("out.txt", "", to_grid(SCHEDULE) + "\n"),
        ("out.deepspeed", "", to_deepspeed(SCHEDULE)),
        ("out.txt", "--from csv --to deepspeed-old", to_deepspeed(SCHEDULE, old=True)),
    ],
)
def test_the_suffix_of_the_new_file_tells_its_format_unless_it_is_given(folder, printed, name, formats, expected):
    told = "2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1"
    assert printed("convert", "in.csv", name, *formats.split()) == f"{name}: {told}\n"
    assert (folder / name).read_bytes().decode() == expected


def test_communication_is_added_and_dropped_on_request(folder):
    assert main(["convert", "in.csv", "lowered.csv", "--lowered"]) == 0
    assert main(["convert", "lowered.csv", "actions.csv", "--compute-only"]) == 0

    assert (folder / "lowered.csv").read_bytes().decode() == lower(SCHEDULE).to_csv()
    assert (folder / "actions.csv").read_bytes() == (folder / "in.csv").read_bytes()


def test_dashes_stand_for_standard_input_and_output(folder, printed, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCHEDULE.to_csv()))

    assert printed("convert", "-", "-", "--to", "deepspeed") == to_deepspeed(SCHEDULE)
    assert [path.name for path in folder.iterdir()] == ["in.csv"]


def test_a_file_that_is_there_is_replaced_on_request_only(folder, refused):
    (folder / "out.json").write_text("precious")

    complaint = refused("convert", "in.csv", "out.json")
    assert "OUT: out.json exists; give another name, or --force to replace it" in complaint
    assert (folder / "out.json").read_text() == "precious"

    assert main(["convert", "in.csv", "out.json", "--force"]) == 0
    assert (folder / "out.json").read_text().startswith("{")


def test_a_link_stays_a_link_to_the_new_text_and_is_not_replaced_by_what_is_wrong(folder):
    (folder / "kept.txt").write_text("old")
    (folder / "link.txt").symlink_to("kept.txt")

    assert main(["convert", "in.csv", "link.txt", "--force"]) == 0
    (folder / "in.csv").write_text("0B0,0F0")
    assert main(["convert", "in.csv", "link.txt", "--force"]) == 1

    assert (folder / "link.txt").is_symlink()
    assert (folder / "kept.txt").read_text() == to_grid(SCHEDULE) + "\n"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ("in.csv out.dat", 1, "--to: out.dat does not end in any of .csv, .json, .txt, .grid, .deepspeed, .megatron"),
        ("in.csv -", 1, "--to: standard output has no name, which would tell its format; give one of csv, json"),
        ("in.csv nowhere/out.csv", 1, "OUT: nowhere is not a folder; make it first"),
        ("in.csv out.megatron", 1, "a table of Megatron-LM cannot express this order"),
        ("in.csv out.grid --lowered", 1, "--lowered: grid holds actions alone; write csv or json"),
        (f"in.csv {os.devnull} --to csv --force", 1, f"OUT: {os.devnull} is not a regular file"),
        ("bad.csv out.json", 1, "bad.csv:2:5: "),
        ("sub/wrong.csv out.json", 1, "penstock: sub/wrong.csv: the schedule breaks 1 rule\n  rank 0, position"),
        ("sub/wrong.json out.json", 1, "penstock: sub/wrong.json: the schedule breaks 1 rule\n"),
        ("a b --lowered --compute-only", 2, "not allowed with argument"),
    ],
)
def test_what_cannot_be_converted_is_one_message_and_leaves_nothing_behind(folder, refused, arguments, status, told):
    orders = [[Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]]
    wrong = Schedule.from_actions("drawn", Placement.line(1), orders, num_microbatches=1)
    (folder / "bad.csv").write_text("0F0\n1F0,x")
    (folder / "sub").mkdir()
    (folder / "sub" / "wrong.csv").write_text(wrong.to_csv())
    (folder / "sub" / "wrong.json").write_text(wrong.to_json())
    before = sorted(path.name for path in folder.iterdir())

    assert told in refused("convert", *arguments.split(), status=status)
    assert sorted(path.name for path in folder.iterdir()) == before
