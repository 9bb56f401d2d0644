"""The run folder is there and writable before a run begins, and files of earlier runs are kept apart."""

import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.execute.observing.log import LOG
from penstock.train.folder.run_folder import HeldFolder, RunFolder, numbered_folders, run_log, run_path
from penstock.train.settings.config import config_to_toml
from tests.package.test_files import largest_file
from tests.train.settings.tables import config_with


def config_in(folder):
    return config_with(run={"folder": str(folder)})


def force(folder):
    RunFolder(folder).begin(config_in(folder), is_forced=True)


RESULTS = [
    "config.toml",
    "metrics.jsonl",
    "rank0.log",
    "rank12.log",
    "schedule.csv",
    "summary.json",
    "timeline.html",
    "timeline.json",
    "timeline.png",
    "timeline.trace.json",
    "weights.safetensors",
]
SHARED = [".lock", "costs.toml", "layer_times.json"]


def leave_a_run(folder, *others):
    """Write what a run leaves behind."""
    config = config_to_toml(config_in(folder))
    (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
    (folder / "tensorboard" / "events.out.tfevents.7").touch()
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "tokens").mkdir(exist_ok=True)
    (folder / "tokens" / "a.tokens").touch()
    for name in {*RESULTS, *SHARED, *others} - {"tensorboard", "checkpoints", "tokens"}:
        (folder / name).write_text(config if name == "config.toml" else "old")


def test_a_run_that_continues_keeps_its_files_and_counts_as_unfinished_once_it_goes_on(tmp_path):
    leave_a_run(tmp_path, "notes.txt", "metrics.jsonl.1.partial")
    (tmp_path / "checkpoints" / "step-4").mkdir()
    (tmp_path / "checkpoints" / "step-5.0123456789ab.partial").mkdir()

    left = {*RESULTS, *SHARED, "tensorboard", "tokens", "checkpoints", "notes.txt"}

    assert RunFolder(tmp_path).begin(config_in(tmp_path / "moved")) == ""
    assert sorted(os.listdir(tmp_path)) == sorted(left)
    assert "moved" not in (tmp_path / "config.toml").read_text()

    RunFolder(tmp_path).go_on(config_in(tmp_path / "moved"))
    assert sorted(os.listdir(tmp_path)) == sorted(left - {"summary.json"})
    assert "moved" in (tmp_path / "config.toml").read_text()
    assert (tmp_path / "metrics.jsonl").read_text() == "old"
    assert RunFolder(tmp_path).checkpoints.steps() == [4]
    assert len(os.listdir(tmp_path / "checkpoints")) == 1


def test_a_run_that_is_forced_removes_what_runs_have_left(tmp_path):
    leave_a_run(tmp_path)
    RunFolder(tmp_path).begin(config_in(tmp_path))
    leave_a_run(tmp_path)
    (tmp_path / "wandb" / "offline-run-1" / "files").mkdir(parents=True)  # which it keeps in a folder of its own
    (tmp_path / "wandb" / "offline-run-1" / "files" / "any").touch()

    force(tmp_path)

    assert sorted(os.listdir(tmp_path)) == [".lock", "config.toml", "tokens"]


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "earlier-1/thesis.tex", "tensorboard/a/b", "checkpoints/step-1/thesis.tex", "config.toml"],
)
def test_a_folder_with_files_or_a_config_that_no_run_wrote_is_never_emptied(tmp_path, name):
    leave_a_run(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("[theirs]")
    before = sorted(tmp_path.rglob("*"))

    told = rf"holds what no run wrote \({name.partition('/')[0]}.*set another run\.folder"
    with pytest.raises(ConfigError, match=r"config\.toml is not of a run\. " if name == "config.toml" else told):
        force(tmp_path)

    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / name).read_text() == "[theirs]"


def test_links_are_removed_and_not_followed(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "events.out.tfevents.1").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "far")

    force(tmp_path / "run")

    assert os.listdir(tmp_path / "run") == ["config.toml"]
    assert os.listdir(tmp_path / "far") == ["events.out.tfevents.1"]


def test_numbers_are_read_as_numbers_and_other_names_are_left_alone(tmp_path):
    for name in ("run", "run-2", "run-10", "run-1", "run-02", "run-x", "run-3.zip", "runs-7"):
        (tmp_path / name).mkdir()

    found = numbered_folders(tmp_path / "run")

    assert found == {1: tmp_path / "run", 2: tmp_path / "run-2", 10: tmp_path / "run-10"}
    assert RunFolder(tmp_path / "run-10").other_tokens == [found[2] / "tokens", found[1] / "tokens"]
    assert RunFolder(tmp_path / "elsewhere").other_tokens == []
    assert numbered_folders(tmp_path / "none") == {}
    assert numbered_folders(tmp_path / "missing" / "none") == {}


def test_a_folder_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert run_path("a/b/") == Path("a/b")
    assert run_path(".") == tmp_path
    assert run_path("a/..").name == tmp_path.name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", r"file: cannot be written: File exists\. .*choose another folder"),
        ("file/run", "file/run: cannot be written: Not a directory"),
    ],
)
def test_a_file_in_place_of_the_folder_or_of_a_parent_and_a_full_disk_are_met_before_training(tmp_path, name, told):
    (tmp_path / "file").write_text("")

    with pytest.raises(PenstockError, match=told):
        RunFolder(tmp_path / name).begin(config_in(tmp_path))
    (tmp_path / "file").unlink()
    with largest_file(10), pytest.raises(PenstockError, match=r"config\.toml: cannot be written"):
        RunFolder(tmp_path).begin(config_in(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_was_renamed_is_found_and_one_that_was_removed_is_not(tmp_path):
    (tmp_path / "run").mkdir()
    held = HeldFolder(tmp_path / "run")
    assert held.is_in_place
    assert held.current_path() == tmp_path / "run"

    (tmp_path / "run").rename(tmp_path / "kept")
    (tmp_path / "run").mkdir()  # another one

    assert not held.is_in_place
    assert held.current_path() == tmp_path / "kept"
    (tmp_path / "kept").rmdir()
    assert held.current_path() is None
    assert RunFolder(tmp_path / "kept").describe_interruption() == "interrupted before the run began"


def opened():
    """Where the open files of this process are; other tests may leave some that are closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one by which the list is read
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_nothing_stays_open(tmp_path):
    held = HeldFolder(tmp_path)
    assert str(tmp_path) in opened()

    del held
    gc.collect()

    assert str(tmp_path) not in opened()


def said(folder):
    LOG.debug("a message")
    LOG.info("the plan")
    return [line.split(" ", 2)[2] for path in folder.glob("*.log") for line in path.read_text().splitlines()]


@pytest.mark.feature("A17")
def test_a_level_writes_what_is_at_least_as_grave_and_leaves_nothing_behind(tmp_path):
    handlers, level = list(LOG.handlers), LOG.level
    found = {}
    for rank, name in enumerate(("info", "debug", "off")):
        (tmp_path / name).mkdir()
        with run_log(tmp_path / name, rank, name):
            found[name] = said(tmp_path / name)

    assert found == {"info": ["INFO the plan"], "debug": ["DEBUG a message", "INFO the plan"], "off": []}
    assert {path.name for path in tmp_path.rglob("*.log")} == {"rank0.log", "rank1.log"}
    assert (list(LOG.handlers), LOG.level) == (handlers, level)
