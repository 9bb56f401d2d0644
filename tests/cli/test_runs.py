"""`penstock runs`: a table, JSON and pictures of the runs in a folder."""

import json
import re

import pytest

from penstock.cli.entry import main
from tests.train.watching.test_run_list import write_run

HEADINGS = "run, state, step, of, loss, held-out loss, tokens/s, bubble, memory, settings that differ"


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "runs" / "a", is_finished=True)
    write_run(tmp_path / "runs" / "b", size=16)
    return tmp_path / "runs"


def test_the_table_has_a_row_per_run_and_what_differs_and_json_all_of_it(printed, folder):
    headings, _, *rows = printed("runs", folder).splitlines()

    assert re.split(" {2,}", headings) == HEADINGS.split(", ")
    first, second = json.loads(printed("runs", folder, "--to", "json"))
    assert (first["name"], first["state"], first["loss"], first["tokens_per_s"]) == ("a", "finished", 2.0, 80.0)
    assert (first["peak_bytes"], second["config"]["batch"]["size"]) == ([2**30, 3 * 2**30], 16)
    assert [re.split(" {2,}", row) for row in rows] == [
        ["a", "finished", "5", "5", "2.0000", "4.5000", "80", "-", "3.00 GiB", "batch.size=8"],
        ["b", "interrupted", "5", "5", "2.0000", "4.5000", "80", "-", "3.00 GiB", "batch.size=16"],
    ]


def test_many_differences_are_counted(printed, tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", size=16, length=64, accumulate=2, allow_ragged=True)
    config = tmp_path / "b" / "config.toml"
    config.write_text(config.read_text().replace("layers = 4", "layers = 3").replace("rate = 0.001", "rate = 0.002"))

    assert printed("runs", tmp_path).count(" and 1 more") == 2


def test_a_picture_goes_by_its_suffix_and_replaces_nothing_unasked(refused, printed, folder, tmp_path):
    path = tmp_path / "curves.png"
    printed("runs", folder, "--output", path)
    assert path.read_bytes().startswith(b"\x89PNG")

    assert "exists; give another name, or --force" in refused("runs", str(folder), "--output", str(path))
    assert b"<svg" in printed("runs", folder, "--to", "svg", "--theme", "dark").encode()
    assert "--theme: only for svg, png" in refused("runs", folder, "--theme", "dark")
    assert "DIR: none is no folder" in refused("runs", "none")


def test_several_folders_and_patterns_are_one_table_and_one_picture(printed, folder, tmp_path):
    write_run(tmp_path / "more" / "c", size=32)

    rows = printed("runs", folder / "b", "--to", "table", tmp_path / "mo*" / "c").splitlines()[2:]
    svg = printed("runs", folder / "*", tmp_path / "more", "--to", "svg")

    assert [row.split()[0] for row in rows] == ["b", "c"]
    assert {"3 runs", "a   batch.size=8", "b   batch.size=16", "c   batch.size=32"} <= set(
        re.findall(r">([^<>]+)</text>", svg)
    )


def test_a_run_that_cannot_be_read_is_named_in_a_line_beside_the_table_of_the_others(capsys, folder):
    (folder / "b" / "config.toml").write_text("[run]\nfolder = 3\n")

    assert main(["runs", str(folder)]) == 0

    printed = capsys.readouterr()
    assert [row.split()[0] for row in printed.out.splitlines()[2:]] == ["a"]
    [line] = printed.err.splitlines()
    assert line.startswith("penstock: run b is left out: run.folder: got 3")
    assert str(folder / "b" / "config.toml") in line
