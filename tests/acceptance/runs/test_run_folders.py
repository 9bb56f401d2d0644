"""Real runs, started again and again with one run file, never destroy each other's results."""

import fcntl
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.processes import is_alive, wait_until
from tests.support.tiny_run import PENSTOCK, TORCHRUN, files_below, fork, fork_training, settings, write_tiny_run

pytestmark = pytest.mark.slow

ENDLESS = ("run.steps=100000", "run.evaluate_every=0", "metrics.every=100000")
TIMEOUT_S = 120


@pytest.fixture
def here(tmp_path):
    write_tiny_run(tmp_path)
    return tmp_path


def finish(process):
    said, complained = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said, complained


def train(folder, *pairs, flags=()):
    return finish(fork([*PENSTOCK, "train", *flags, "run.toml", *settings(*pairs)], folder))


def start_torchrun(folder, *pairs):
    pairs = dict.fromkeys(("pipeline.ranks=2", *pairs))
    return fork([*TORCHRUN, "2", *PENSTOCK, "train", "run.toml", *settings(*pairs)], folder)


def holders_of(folder):
    """Return the processes that hold a folder; ranks end by themselves after the launcher that started them."""
    first, *others = [int(line.split()[0]) for line in (folder / ".lock").read_text().splitlines()]
    return [first, *(process for process in others if process != first and not is_started_by(process, first))]


def is_free(folder):
    with open(folder / ".lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def is_started_by(process, launcher):
    return f"PPid:\t{launcher}\n" in Path(f"/proc/{process}/status").read_text()


def wait_for_metrics(folder, training):
    path = folder / "run" / "metrics.jsonl"
    wait_until(lambda: training.poll() is not None or (path.exists() and path.stat().st_size), timeout_s=TIMEOUT_S)
    assert training.poll() is None, training.communicate()


@pytest.mark.parametrize("start_first", [fork_training, start_torchrun], ids=["launched", "torchrun"])
def test_a_second_run_in_a_held_folder_is_refused_and_a_killed_one_continues(here, start_first):
    first = start_first(here, "pipeline.ranks=2", "checkpoint.every=0", *ENDLESS)
    wait_for_metrics(here, first)

    status, said, complained = train(here)
    holders = {line.split()[0] for line in (here / "run" / ".lock").read_text().splitlines()}
    begun = (here / "run" / "metrics.jsonl").read_bytes()[:200]
    for holder in holders_of(here / "run"):
        os.kill(holder, signal.SIGKILL)
    first.communicate(timeout=TIMEOUT_S)
    # A rank that ends closes what it prints to a moment before the folder is free, and so does what it has started.
    wait_until(lambda: not any(map(is_alive, holders)) and is_free(here / "run"), timeout_s=TIMEOUT_S)
    again = train(here)

    assert (status, said) == (1, "")
    assert len(holders) == (3 if start_first is fork_training else 2), "every rank holds the folder"
    assert complained.startswith("penstock: run.folder: run is in use by process ")
    assert complained.count("\n") == 1
    assert again[0] == 0, again
    assert (here / "run" / "metrics.jsonl").read_bytes().startswith(begun)
    assert not (here / "run-2").exists()


def test_the_process_that_is_named_is_the_one_that_was_started(here):
    first = fork_training(here, "pipeline.ranks=2", *ENDLESS)
    wait_for_metrics(here, first)

    _, _, complained = train(here)
    first.send_signal(signal.SIGINT)
    status, said, interrupted = finish(first)

    assert f"run is in use by process {first.pid}. " in complained
    assert (status, interrupted) == (130, "")
    assert re.search(r"^stopped by a signal after step (\d+); its checkpoint is saved$", said, re.MULTILINE)
    kept = "interrupted; run keeps checkpoints, config.toml, metrics.jsonl, schedule.csv. The same command continues"
    assert said.splitlines()[-1].startswith(kept)


def test_all_ranks_of_torchrun_use_the_folder_that_rank_0_chose(here):
    assert train(here)[0] == 0
    before = {name: (here / "run" / name).read_bytes() for name in files_below(here / "run") if "." in name}

    status, said, _ = finish(start_torchrun(here, "debug.log=info"))

    assert status == 0
    assert said.count("run folder: run-2 (run holds a finished run)\n") == 1
    assert {"rank0.log", "rank1.log", "weights.safetensors", "summary.json"} < files_below(here / "run-2")
    assert {name: (here / "run" / name).read_bytes() for name in before} == before
    assert not (here / "run-2" / "tokens").exists(), "those of the first run are used"
    assert 'folder = "run-2"' in (here / "run-2" / "config.toml").read_text()
