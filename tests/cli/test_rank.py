"""A rank tells its failure once: to its launcher, or on standard error."""

import os
import sys

import pytest

from penstock.cli.failure import read_failures
from penstock.cli.launch import LoopbackRendezvous
from penstock.cli.rank import run_rank
from penstock.errors import ConfigError, DeadlineExceeded, NotFinite, PeerLost, PipelineError
from tests.cli.test_launch import launch_stub


def run_in_fork(error, environment, tmp_path):
    """Run a rank whose body raises `error`; return its exit status and what it printed to standard error."""

    def body():
        raise error

    child = os.fork()
    if child == 0:
        sys.stderr = open(tmp_path / "printed", "w")  # noqa: SIM115
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        run_rank(body, environment=environment)
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, (tmp_path / "printed").read_text()


def launched(rendezvous, rank):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": rendezvous.get_run_id(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.port),
    }


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("no such file", key="data.files"), 1, "data.files: no such file"),
        (PipelineError("F2 broke"), 4, "rank 1 failed: F2 broke"),
        (NotFinite("step 3: the loss is nan"), 7, "step 3: the loss is nan"),
        (DeadlineExceeded("no rank goes on: a message was lost"), 5, "no rank goes on: a message was lost"),
    ],
)
def test_a_launched_rank_tells_its_launcher_and_prints_nothing(tmp_path, error, status, message):
    rendezvous = LoopbackRendezvous()

    found = run_in_fork(error, launched(rendezvous, 1), tmp_path)

    assert found == (status, "")
    [failure] = read_failures(rendezvous.store, 2)
    assert (failure.rank, failure.status, failure.shown) == (1, status, message)


def test_an_unexpected_error_is_told_with_its_traceback_and_a_reader_that_left_is_no_failure(tmp_path):
    rendezvous = LoopbackRendezvous()

    assert run_in_fork(BrokenPipeError(), launched(rendezvous, 0), tmp_path) == (130, "")
    assert read_failures(rendezvous.store, 1) == []
    assert run_in_fork(ZeroDivisionError("by nothing"), launched(rendezvous, 0), tmp_path) == (70, "")
    [failure] = read_failures(rendezvous.store, 1)
    assert failure.status == 70
    assert failure.shown.startswith("rank 0 failed: Traceback")
    assert "ZeroDivisionError: by nothing\n\nThis is a bug in Penstock" in failure.message


@pytest.mark.parametrize(
    ("error", "rank", "expected"),
    [
        (PeerLost("peer 1 is gone"), "3", (4, "penstock: rank 3 failed: peer 1 is gone\n")),
        (ConfigError("is wrong"), "0", (1, "penstock: is wrong\n")),
        (ConfigError("is wrong"), "1", (1, "")),
    ],
)
def test_a_rank_of_torchrun_prints_its_failure_and_wrong_input_that_every_rank_meets_once(
    tmp_path, error, rank, expected
):
    assert run_in_fork(error, {"RANK": rank, "LOCAL_RANK": rank}, tmp_path) == expected


def test_what_two_ranks_of_torchrun_have_to_say_is_printed_once(tmp_path):
    rendezvous = LoopbackRendezvous()
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}

    first = run_in_fork(ConfigError("is wrong"), launched(rendezvous, 1) | torchrun, tmp_path)
    second = run_in_fork(ConfigError("is wrong"), launched(rendezvous, 0) | torchrun, tmp_path)
    another = run_in_fork(PeerLost("gone"), launched(rendezvous, 0) | torchrun, tmp_path)

    assert [first, second] == [(1, "penstock: is wrong\n"), (1, "")]
    assert another == (4, "penstock: rank 0 failed: gone\n")


@pytest.mark.slow
def test_of_two_failed_ranks_the_launch_ends_with_the_cause(tmp_path):
    failure = launch_stub("lost", tmp_path)

    assert (failure.rank, failure.status) == (1, 70)
    assert "RuntimeError: the cause\n" in failure.message
