"""`penstock init`: what it writes runs as it is, and nothing is replaced unasked."""

import json
import re

import pytest

from penstock.cli.entry import main
from penstock.train.settings.config import load_config
from penstock.train.setup import check_plan
from tests.support.tiny_run import PENSTOCK, TORCHRUN, fork, settings


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def done(process):
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    return output


def test_the_name_of_a_file_says_what_it_is_and_stands_in_its_text(printed, place):
    assert printed("init") == "RUN.toml is written; next: penstock train RUN.toml\n"
    check_plan(load_config("RUN.toml"))
    assert printed("init", "my.toml") == "my.toml is written; next: penstock train my.toml\n"
    assert printed("init", "my.py").startswith("my.py is written; next: python my.py")

    assert "penstock train my.toml" in (place / "my.toml").read_text()
    assert "RUN.toml" not in (place / "my.toml").read_text()
    assert "torchrun --standalone --nproc-per-node 2 my.py" in (place / "my.py").read_text()
    printed("init", "script", "mine.py")
    assert "ps.Pipeline(" in (place / "mine.py").read_text()


@pytest.mark.slow
def test_the_run_file_trains_as_it_is(place):
    main(["init"])

    output = done(fork([*PENSTOCK, "train", "RUN.toml", *settings("run.steps=22")], place))

    rows = [json.loads(line) for line in (place / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (place / "runs/first/timeline.html").exists()
    assert "on 2 ranks" in output


@pytest.mark.slow
def test_the_script_runs_on_one_process_and_under_torchrun_with_equal_losses(place):
    main(["init", "script"])

    found = [done(fork(command, place)) for command in (["train.py"], [*TORCHRUN, "2", "train.py"])]

    losses = [float(loss) for loss in re.findall(r"loss (\S+)", found[0])]
    assert found[0] == found[1]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


def test_a_file_that_exists_is_replaced_only_with_force(refused, place):
    (place / "train.py").write_text("mine")

    error = refused("init", "script")
    assert error == "penstock: PATH: train.py exists; give another name, or --force to replace it\n"
    assert (place / "train.py").read_text() == "mine"
    assert main(["init", "script", "--force"]) == 0
    assert "ps.Pipeline(" in (place / "train.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["rnu"], 2, "'rnu' is no kind and no file of one; expected run or script: penstock init RUN.toml or pen"),
        (["mine.toml", "other.toml"], 1, "PATH: two files are named, 'mine.toml' and 'other.toml'; name one"),
    ],
)
def test_wrong_arguments_are_refused(refused, place, arguments, status, text):
    assert text in refused("init", *arguments, status=status)
