"""`penstock train`: who starts the ranks, and what is refused."""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from penstock.cli import launch, train
from penstock.cli.entry import main
from penstock.cli.failure import RankFailure
from penstock.train.claim import Start
from tests.support.tiny_run import settings

RUN = """
[run]
folder = "{folder}"

[pipeline]
ranks = 2

[data]
corpus = "stdlib"
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path / "run"))
    return str(path)


@pytest.fixture
def launches(monkeypatch):
    """Collect the launches; each ends with the outcome that the test puts into `outcomes`."""

    class Launches(list):
        outcome = None

        def __call__(self, command, *, num_ranks, port, may_stop):
            assert may_stop, "ranks save when they are told to end"
            self.append((command, num_ranks, port))
            return self.outcome

    recorded = Launches()
    monkeypatch.setattr(launch, "launch_ranks", recorded)
    return recorded


def test_as_many_ranks_as_are_asked_for_are_launched_with_the_same_command(run_file, launches):
    assert main(["train", run_file, "--set", "batch.size=8", "--set", "pipeline.ranks=4", "--port", "7"]) == 0

    [(command, num_ranks, port)] = launches
    assert command[0] == sys.executable
    folder = f'--set=run.folder="{Path(run_file).parent / "run"}"'
    told = ["penstock", "train", "--set=batch.size=8", "--set=pipeline.ranks=4", folder, "--", run_file]
    assert command[-7:] == told
    assert (num_ranks, port) == (4, 7)


def test_ranks_get_the_folder_that_was_chosen_and_the_flags(run_file, launches):
    folder = Path(run_file).parent / "run"
    folder.mkdir()
    (folder / "thesis.tex").touch()

    assert main(["train", run_file]) == main(["train", run_file, "--fresh"]) == 0
    assert main(["train", run_file, "--force", "--set", f"run.folder={folder}-9"]) == 0

    commands = [command[command.index("penstock") + 1 : -2] for command, _, _ in launches]
    assert commands == [
        ["train", f'--set=run.folder="{folder}-2"'],
        ["train", "--fresh", f'--set=run.folder="{folder}-2"'],
        ["train", "--force", f'--set=run.folder="{folder}-9"'],
    ]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["run"], "no run began"


def test_what_cannot_begin_is_refused_before_a_rank_is_started(run_file, launches, refused):
    folder = Path(run_file).parent
    (folder / "weights.pt").write_bytes(b"\x80\x04.")
    load = ["--set", f'checkpoint.load="{folder / "weights.pt"}"']

    for arguments, status, told in (
        (
            [run_file, "--resume"],
            6,
            f"--resume: {folder / 'run'}: there is no such folder; leave --resume out to",
        ),
        (
            [run_file, *load],
            6,
            f"{folder / 'weights.pt'}: is no safetensors file; Penstock reads no other",
        ),
        ([run_file, "--fresh", "--force"], 2, "not allowed with argument"),
        ([run_file, "--resume", "--force"], 2, "not allowed with argument"),
        ([folder / "none.toml"], 1, "none.toml"),
    ):
        assert told in refused("train", *arguments, status=status)
    assert launches == []


@pytest.mark.parametrize(
    ("flag", "count", "start"),
    [
        ("fresh", "0", Start.FRESH),
        ("fresh", "1", Start.BY_RULE),
        ("force", "0", Start.FORCE),
        ("force", "2", Start.RESTART),
        ("resume", "1", Start.RESUME),
        ("", "0", Start.BY_RULE),
    ],
)
def test_a_rank_that_torchrun_starts_again_continues_what_the_first_try_began(monkeypatch, flag, count, start):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    flags = {name: name == flag for name in ("fresh", "force", "resume")}

    assert train._start_of(Namespace(**flags)) is start


@pytest.mark.parametrize(
    ("failure", "status", "printed"),
    [
        (RankFailure(1, 5, "rank 1 waited 60 s"), 5, "penstock: rank 1 waited 60 s\n"),
        (RankFailure(0, 130, ""), 130, ""),
    ],
)
def test_a_failed_launch_prints_the_cause_and_ends_with_its_status(
    run_file, launches, capsys, failure, status, printed
):
    launches.outcome = failure

    assert main(["train", run_file]) == status
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["pipeline.ranks=64"], r"pipeline\.ranks: 64 ranks need at least 64 layers, but the model has 7"),
        (
            ["pipeline.schedule=interleaved-1f1b", "pipeline.stages_per_rank=100000000"],
            r"pipeline\.ranks: 2 ranks of 100000000 stages need at least 100000000 layers, but the model has 7",
        ),
        (["pipeline.ranks=4", "pipeline.schedule=zbv"], r"has 8 stages, but the model has only 7 layers"),
    ],
)
@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_plan_that_cannot_run_is_refused_before_any_rank_starts(run_file, launches, refused, command, pairs, message):
    assert re.search(message, refused(command, run_file, *settings(*pairs)))
    assert launches == []
    assert not (Path(run_file).parent / "run").exists()


@pytest.mark.slow
def test_as_a_rank_of_torchrun_a_wrong_world_size_is_one_message(run_file, capfd, monkeypatch):
    child = os.fork()
    if child == 0:
        os.environ.update(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
        os._exit(main(["train", run_file]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status == 1
    assert capfd.readouterr().err.startswith("penstock: pipeline.ranks: the run is for 2 ranks, but 3 processes")
