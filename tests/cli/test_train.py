"""`penstock train`: who starts the ranks, and what is refused."""

import os
import sys

import pytest

from penstock.cli import launch
from penstock.cli.entry import main
from penstock.cli.failure import RankFailure

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

        def __call__(self, command, *, num_ranks, port):
            self.append((command, num_ranks, port))
            return self.outcome

    recorded = Launches()
    monkeypatch.setattr(launch, "launch_ranks", recorded)
    return recorded


def test_two_ranks_are_launched_with_the_same_command(run_file, launches):
    assert main(["train", run_file, "--set", "batch.size=4", "--set", "run.steps=99", "--port", "7"]) == 0

    [(command, num_ranks, port)] = launches
    assert command[0] == sys.executable
    assert command[-6:] == ["penstock.cli", "train", "--set=batch.size=4", "--set=run.steps=99", "--", run_file]
    assert (num_ranks, port) == (2, 7)


def test_the_number_of_ranks_may_be_overridden(run_file, launches):
    main(["train", run_file, "--set", "pipeline.ranks=4"])

    assert launches[0][1] == 4


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


def test_a_missing_run_file_is_refused_before_anything_starts(tmp_path, launches, capsys):
    assert main(["train", str(tmp_path / "none.toml")]) == 1
    assert "none.toml" in capsys.readouterr().err
    assert launches == []


@pytest.mark.slow
def test_as_a_rank_of_torchrun_a_wrong_world_size_is_one_message(run_file, capfd, monkeypatch):
    child = os.fork()
    if child == 0:
        os.environ.update(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
        os._exit(main(["train", run_file]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status == 1
    assert capfd.readouterr().err.startswith("penstock: pipeline.ranks: the run is for 2 ranks, but 3 processes")
