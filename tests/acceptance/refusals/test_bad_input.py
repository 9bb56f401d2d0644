"""Whatever a newcomer types wrong, or the machine lacks: one clear message, status 1, no traceback, nothing left."""

import errno
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

SCHEDULES = {
    "truncated.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F\n",
    "empty.csv": "",
    "two.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "other.csv": "0F0,0F1,0F2,0B0,0B1,0B2\n",
}
WRONG_SETTINGS = {
    "no ranks": ("pipeline.ranks=0", r"pipeline\.ranks: got 0, expected greater than or equal to 1"),
    "a wrong option": ("pipeline.options={warm=1}", r"pipeline\.options\.warm: 1f1b has no option .*'warmup'"),
    "an option's value": ('pipeline.options={warmup="x"}', r"pipeline\.options\.warmup: 'x' is not"),
    "stages per rank": ("pipeline.stages_per_rank=9", r"pipeline\.stages_per_rank: 1f1b takes 1 stage"),
    "a split of other layers": ("pipeline.split=[9]", r"split \[9\] .* the model has 5; take 4 away"),
    "a split of other stages": ("pipeline.split=[3, 2]", "names 2 stages, but the schedule has 1"),
    "a schedule for other ranks": ("pipeline.schedule=two.csv", r"pipeline\.schedule: two is for 2 ranks, but 1 run"),
    "for other microbatches": ("pipeline.schedule=other.csv", r"pipeline\.microbatches: 2, but other is for 3"),
    "a schedule cut off": ("pipeline.schedule=truncated.csv", r"truncated\.csv:2:\d+: '1F' ends"),
    "a missing schedule": ("pipeline.schedule=none.csv", r"pipeline\.schedule: cannot read 'none\.csv'.*give the path"),
    "nothing to learn": ("pipeline.schedule=forward-only", "has no backwards, so nothing would be learned"),
    "an uneven batch": ("batch.size=3", r"batch\.size: 3 is not a multiple .* use 2 or 4, or set batch\.allow_ragged"),
    "a wrong type": ("pipeline.ranks=two", r"pipeline\.ranks: got 'two', expected a valid integer"),
    "a list that is none": ("data.files=3", r"data\.files: got 3, expected a list"),
    "not a number": ("optimizer.learning_rate=nan", r"optimizer\.learning_rate: got nan, expected a finite number"),
    "an unknown key": ("batch.sise=3", r"batch\.sise: unknown key\. Did you mean 'batch\.size'\?"),
    "a missing text": ('data.files=["none.txt"]', r"data\.files: none\.txt: cannot be read: No such file"),
    "a device": ('data.files=["/dev/zero"]', r"data\.files: /dev/zero is neither a file nor a folder"),
    "text in another code": ('data.files=["latin.txt"]', r"latin\.txt: byte 0xe9 at offset 3 is not UTF-8; convert"),
    "an empty text": ('data.files=["empty.csv"]', r"data\.files: the corpus is empty: .*name files with text"),
    "a folder without text": ('data.files=["tmp"]', r"data\.files: no file ending in .* lies below tmp; name"),
    "a missing tokenizer": ("data.tokenizer=none.json", r"data\.tokenizer: none\.json: cannot be read"),
    "another file as tokenizer": ("data.tokenizer=two.csv", r"data\.tokenizer: two\.csv is not a tokenizers JSON"),
    "a folder below a file": ("run.folder=text.txt/run", r"text\.txt/run: cannot be written: Not a directory"),
    "a file as folder": ("run.folder=text.txt", r"text\.txt: cannot be written: File exists.*choose another folder"),
    "no place for folders": ("run.folder=/proc/run", r"/proc/run: cannot be written: No such file"),
    "a name too long": (f"run.folder={'x' * 300}", "cannot be written: File name too long"),
    "the root": ("run.folder=/", r"run\.folder: '/' is no folder for a run; name another one"),
    "no name at all": ('run.folder="a\\u0000b"', r"run\.folder: .* holds a null character"),
}

TOO_SHORT = {
    "for one window": (
        "data.files=['two.csv']",
        r"the corpus has \d+ tokens to train on, but .* needs 201; .*or lower",
    ),
    "for evaluation": ("data.held_out_fraction=0.01", r"held-out part has 0 sequences .*raise data\.held_out_fraction"),
}

WRONG_CONFIGS = {
    "cut off": ("cut.toml", r"cut\.toml:2:10: not TOML"),
    "in another code": ("latin.toml", r"latin\.toml:2:14: byte 0xe9 is not UTF-8"),
    "a folder": (".", r"\.: cannot be read: Is a directory"),
}


def table(cases):
    return pytest.mark.parametrize(("given", "message"), cases.values(), ids=cases.keys())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a good run, and with all that can be wrong with its files."""
    write_tiny_run(tmp_path)
    for name, text in SCHEDULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 300)
    (tmp_path / "latin.toml").write_bytes(b'[run]\nfolder = "caf\xe9"\n')
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


@table(WRONG_SETTINGS)
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


@table(WRONG_CONFIGS)
def test_a_run_file_that_cannot_be_read_is_refused_with_the_place(refusal, given, message):
    assert re.search(message, refusal(["train", given]))


@table(TOO_SHORT)
def test_too_little_text_is_refused_with_the_numbers(here, refusal, given, message):
    assert re.search(message, refusal(["train", "run.toml", *settings("batch.length=200", given)]))
    assert os.listdir(here / "run") == ["tokens"]


@pytest.mark.slow
def test_a_refused_run_leaves_the_findings_of_an_earlier_one(here):
    assert main(["train", "run.toml", *settings("metrics.every=99")]) == 0
    before = {name: (here / "run" / name).read_bytes() for name in ("config.toml", "schedule.csv", "metrics.jsonl")}

    status = main(["train", "run.toml", *settings('data.files=["none.txt"]')])

    assert status == 1
    assert {name: (here / "run" / name).read_bytes() for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.toml", "schedule.csv", "weights.safetensors"])
def test_a_file_that_may_not_be_written_is_named(here, capsys, monkeypatch, name):
    def replace(source, target, replace=os.replace):
        if os.path.basename(target) == name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace)

    status = main(["train", "run.toml"])

    complained = capsys.readouterr().err
    assert status == 1
    assert re.fullmatch(r"penstock: [^\n]*\brun[^\n]*: cannot be written: Is a directory\. .*folder\n", complained)
    assert "Free some space" not in complained


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
