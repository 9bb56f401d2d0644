"""Real trainings, however they are started: the same weights, and a quick, clean end however they are ended."""

import itertools
import json
import os
import random
import re
import signal
import time

import pytest

from tests.cli.processes import LOOPBACK, PATIENT_S, is_alive, listening_addresses, shared_memory, wait_until
from tests.support.tiny_run import (
    PENSTOCK,
    TORCHRUN,
    files_below,
    fork,
    fork_training,
    ranks_of,
    settings,
    start_training,
    write_tiny_run,
)

ENDLESS = ("run.steps=100000", "optimizer.warmup_steps=1", "run.evaluate_every=50")
SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TIMEOUT_S = 100


def metrics_of(folder):
    """Return the lines that a run has written so far, each of which must be whole."""
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(folder, num_steps):
    path = folder / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= num_steps, timeout_s=60)


@pytest.fixture
def folders(tmp_path):
    """Return a function that makes a new folder with a tiny run."""
    numbers = itertools.count()

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        write_tiny_run(folder)
        return folder

    return make


@pytest.mark.slow
def test_one_file_trains_the_same_weights_on_1_2_and_4_ranks_under_torchrun_and_slurm_too(folders):
    def torchrun(num_ranks, folder, **environment):
        run = [*TORCHRUN, str(num_ranks), *PENSTOCK, "train", "run.toml"]
        return fork([*run, *settings(f"pipeline.ranks={num_ranks}")], folder, **environment)

    places = [folders() for _ in range(4)]
    started = [fork_training(place, f"pipeline.ranks={num}") for place, num in zip(places, (1, 2), strict=False)]
    started += [torchrun(2, places[2]), torchrun(4, places[3], **SLURM)]

    printed = [process.communicate(timeout=TIMEOUT_S) for process in started]

    assert [process.returncode for process in started] == [0] * 4, printed
    weights = [(place / "run" / "weights.safetensors").read_bytes() for place in places]
    assert weights[1:] == weights[:1] * 3
    for said, _ in printed:
        assert said.count("step 6/6") == 1, "rank 0 alone speaks"


def interrupt_at_a_random_moment(folder, chance, begin):
    """Start a training and interrupt it: it ends before torch would end it, and leaves nothing behind."""
    training = begin(folder, "pipeline.ranks=2", *ENDLESS)
    wait_for_steps(folder, chance.randrange(40))
    time.sleep(chance.uniform(0.0, 0.2))
    ranks = ranks_of(training.pid)
    listening = listening_addresses([training.pid, *ranks.values()])
    shared = shared_memory([training.pid, *ranks.values()])

    chance.choice((os.kill, os.killpg))(training.pid, signal.SIGINT)
    _, complained = training.communicate(timeout=PATIENT_S)

    assert (training.returncode, complained) == (130, "")
    assert sorted(ranks) == [0, 1]
    assert {address for address, _ in listening} == {LOOPBACK}
    assert not any(is_alive(process) for process in ranks.values())
    assert not shared & set(os.listdir("/dev/shm"))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "begin"), [(1, start_training), (2, fork_training), (3, fork_training)])
def test_ctrl_c_ends_a_training_and_keeps_what_was_written(folders, seed, begin):
    folder = folders()

    interrupt_at_a_random_moment(folder, random.Random(seed), begin)

    steps = [metrics["step"] for metrics in metrics_of(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert files_below(folder / "tmp") == set()
    assert not [name for name in files_below(folder) if name.endswith(".partial")]


@pytest.mark.slow
def test_what_ranks_had_half_written_goes_with_them(folders):
    folder = folders()
    (folder / "run" / "tokens").mkdir(parents=True)
    for partial in ("run/weights.safetensors.1.partial", "run/tokens/2.tokens.3.partial"):
        (folder / partial).write_text("half")
    training = fork_training(folder, "pipeline.ranks=2", *ENDLESS)
    wait_until(lambda: len(ranks_of(training.pid)) == 2, timeout_s=60)

    os.kill(training.pid, signal.SIGTERM)
    training.communicate(timeout=TIMEOUT_S)

    assert training.returncode == 130
    assert not [name for name in files_below(folder) if name.endswith(".partial")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "deadline_s", "complaint"),
    [
        (signal.SIGKILL, 4, 10 * PATIENT_S, r"penstock: rank 1 was ended by SIGKILL\. "),
        (signal.SIGSTOP, 5, 6.0, r"penstock: rank (1 is the culprit: its process \d+ is stopped|0: waited .* rank 1)"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_ends_the_training_with_one_message_that_names_it(
    folders, number, status, deadline_s, complaint
):
    folder = folders()
    given = ("pipeline.ranks=2", f"run.deadline_s={deadline_s}", "checkpoint.every=2")
    training = fork_training(folder, *given, *ENDLESS)
    wait_for_steps(folder, 3)
    wait_until((folder / "run" / "checkpoints" / "step-2").exists, timeout_s=60)
    ranks = ranks_of(training.pid)

    os.kill(ranks[1], number)
    _, complained = training.communicate(timeout=PATIENT_S)

    assert training.returncode == status, complained
    assert re.match(complaint, complained), complained
    assert complained.count("penstock: ") == 1
    assert "Traceback" not in complained
    assert re.search(r"\nThe same command continues after step \d+$", complained.rstrip()), complained
    assert not any(is_alive(process) for process in ranks.values())
    assert metrics_of(folder)
