"""The run folder is there, writable and free of old findings before a run begins."""

import os

import pytest

from penstock.errors import PenstockError
from penstock.train.config import config_from_table, load_config
from penstock.train.run_folder import RunFolder
from tests.train.test_files import largest_file


def config_in(folder):
    return config_from_table({"run": {"folder": str(folder)}, "data": {"corpus": "stdlib"}})


def test_the_resolved_configuration_reads_back(tmp_path):
    config = config_in(tmp_path / "runs" / "first")

    RunFolder(tmp_path / "runs" / "first").begin(config)

    assert load_config(tmp_path / "runs" / "first" / "config.toml") == config


def test_findings_of_an_earlier_run_go_and_its_weights_stay(tmp_path):
    found_out = ["schedule.csv", "summary.json", "timeline.json", "timeline.png", "timeline.trace.json"]
    for name in [*found_out, "weights.safetensors", "notes.txt"]:
        (tmp_path / name).write_text("old")

    RunFolder(tmp_path).begin(config_in(tmp_path))

    assert sorted(os.listdir(tmp_path)) == ["config.toml", "notes.txt", "weights.safetensors"]


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")

    with pytest.raises(PenstockError, match=r"run: cannot be written: File exists\. .*choose another folder"):
        RunFolder(tmp_path / "run").begin(config_in(tmp_path))


def test_a_file_among_the_parents_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(PenstockError, match=r"file/run: cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").begin(config_in(tmp_path))


def test_a_full_disk_is_met_before_training(tmp_path):
    with largest_file(10), pytest.raises(PenstockError, match=r"config\.toml: cannot be written"):
        RunFolder(tmp_path).begin(config_in(tmp_path))

    assert os.listdir(tmp_path) == []


def test_written_files_hold_their_content(tmp_path):
    RunFolder(tmp_path).write("a.txt", b"text")

    assert (tmp_path / "a.txt").read_bytes() == b"text"
