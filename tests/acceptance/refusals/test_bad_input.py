"""Whatever a newcomer types wrong, or the machine lacks: one clear message, status 1, no traceback, nothing left."""

import os
import re

import pytest

from penstock.cli import main
from penstock.errors import ConfigError, PartitionError
from penstock.train.settings.config import load_config
from penstock.train.setup import check_plan
from tests.support.tiny_run import PENSTOCK, TORCHRUN, files_below, fork, fork_training, settings, write_tiny_run

PROGRESS = r"(run folder: .* \(new\)\n([0-9]+ ranks? on .*; precision .*\n)?(.* \.\.\.\n)*)?"
"""All that a refused command may print: the folder that a run would have used, where, and what it began to do."""

WRONG_SETTINGS = {
    "no ranks": ("pipeline.ranks=0", r"pipeline\.ranks: got 0, expected greater than or equal to 1"),
    "a wrong option": ("pipeline.options={warm=1}", r"pipeline\.options\.warm: 1f1b has no option .*'warmup'"),
    "a schedule cut off": ("pipeline.schedule=truncated.csv", r"truncated\.csv:2:\d+: '1F' ends"),
    "a missing schedule": ("pipeline.schedule=none.csv", r"pipeline\.schedule: cannot read 'none\.csv'.*give the path"),
    "a missing text": ('data.files=["none.txt"]', r"data\.files: none\.txt: cannot be read: No such file"),
    "no place for folders": ("run.folder=/proc/run", r"/proc/run: cannot be written: No such file"),
    "a name too long": (f"run.folder={'x' * 300}", "cannot be written: File name too long"),
    "the root": ("run.folder=/", r"run\.folder: '/' is no folder for a run; name another one"),
    "no name at all": ('run.folder="a\\u0000b"', r"run\.folder: .* holds a null character"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a good run, and with a run file and a schedule that were cut off."""
    write_tiny_run(tmp_path)
    (tmp_path / "truncated.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F\n")
    (tmp_path / "cut.toml").write_text("[run]\nfolder = \n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def refusal(here, capsys):
    """Run a command that must be refused with one message, and return the message."""

    def run(arguments):
        status = main(arguments)

        said, complained = capsys.readouterr()
        assert status == 1
        assert re.fullmatch(PROGRESS, said)
        assert re.findall("^penstock: ", complained, flags=re.MULTILINE) == ["penstock: "]
        assert "Traceback" not in complained
        return complained

    return run


@pytest.mark.parametrize(("given", "message"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_before_anything_is_written(here, refusal, given, message):
    before = files_below(here)

    assert re.search(message, refusal(["train", "run.toml", "--set", given]))
    assert files_below(here) == before


def test_more_stages_than_layers_are_refused_before_anything_is_read(here):
    missing = 'data.files=["none.txt"]'
    too_many = load_config("run.toml", ["pipeline.ranks=6", missing])
    too_many_stages = load_config("run.toml", ["pipeline.ranks=3", "pipeline.schedule=zbv", missing])

    with pytest.raises(ConfigError, match=r"pipeline\.ranks: 6 ranks need at least 6 layers, but the model has 5 .*"):
        check_plan(too_many)
    with pytest.raises(PartitionError, match=r"6 stages, but the model has only 5 layers .* use at most 5 stages"):
        check_plan(too_many_stages)


def test_a_run_file_that_cannot_be_read_is_refused_with_the_place(refusal):
    assert re.search(r"cut\.toml:2:10: not TOML", refusal(["train", "cut.toml"]))


def test_too_little_text_is_refused_with_the_numbers(here, refusal):
    given = settings("batch.length=200", "data.held_out_fraction=0.01")

    assert re.search(
        r"held-out part has 0 sequences .*raise data\.held_out_fraction", refusal(["train", "run.toml", *given])
    )
    assert os.listdir(here / "run") == ["tokens"]


@pytest.mark.slow
def test_a_refused_run_leaves_the_findings_of_an_earlier_one(here):
    assert main(["train", "run.toml", *settings("metrics.every=99")]) == 0
    before = {name: (here / "run" / name).read_bytes() for name in ("config.toml", "schedule.csv", "metrics.jsonl")}

    status = main(["train", "run.toml", *settings('data.files=["none.txt"]')])

    assert status == 1
    assert {name: (here / "run" / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_wrong_input_that_several_ranks_meet_is_told_once(tmp_path):
    """By the ranks that are started here, and by torchrun's, whatever torchrun itself has to say."""
    write_tiny_run(tmp_path)
    train = [*PENSTOCK, "train", "run.toml", *settings("pipeline.ranks=2", 'data.files=["none.txt"]')]
    run_many = [*TORCHRUN, "2", *train]
    wrong_number = [*TORCHRUN, "3", *PENSTOCK, "train", "run.toml", *settings("pipeline.ranks=2")]
    started = [
        fork_training(tmp_path, "pipeline.ranks=2", "pipeline.schedule=gpip"),
        fork(run_many, tmp_path),
        fork(wrong_number, tmp_path),
    ]

    complaints = [process.communicate(timeout=100)[1] for process in started]

    assert [process.returncode for process in started] == [1, 1, 1]
    assert complaints[0].startswith("penstock: pipeline.schedule: there is no schedule 'gpip'; known: ")
    ours = [re.findall("^penstock: .*", complaint, flags=re.MULTILINE) for complaint in complaints]
    assert [len(messages) for messages in ours] == [1, 1, 1], complaints
    assert "data.files: none.txt: cannot be read" in ours[1][0]
    assert "for 2 ranks, but 3 processes run" in ours[2][0]
    assert not (tmp_path / "run").exists()
