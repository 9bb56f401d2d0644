"""A signal to every process of a run at once, as a terminal and many job systems send it, loses no step."""

import os
import re
import signal
from functools import partial
from tempfile import TemporaryDirectory

import pytest

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.verification import verify
from penstock.train.watching.metrics import read_metrics
from tests.cli.processes import wait_until
from tests.support.forks import SHORT_FOLDER
from tests.support.tiny_run import PENSTOCK, TORCHRUN, fork, fork_training, settings, start, write_tiny_run

NUM_STEPS = 120
OPTIONS = (f"run.steps={NUM_STEPS}", "run.evaluate_every=0", "run.evaluate_batches=0", "checkpoint.every=1000")
TIMEOUT_S = 100


WORKERS = """
import signal

import torch
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(256, (self.length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


def die_of_signals(worker):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def batches(batch_size, length):
    return DataLoader(Tokens(length), batch_size=batch_size, num_workers=2, worker_init_fn=die_of_signals)
"""
"""Data that other processes read, which a signal ends at once."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The weights of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    write_tiny_run(folder)
    training = fork_training(folder, *OPTIONS)
    _, complained = training.communicate(timeout=TIMEOUT_S)
    assert training.returncode == 0, complained
    return (folder / "run" / "weights.safetensors").read_bytes()


@pytest.fixture
def short_folder():
    """A temporary folder for sockets, whose paths may have 107 bytes: that of a test may be too long for them."""
    with TemporaryDirectory(dir=SHORT_FOLDER) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "number"), [("penstock", signal.SIGINT), ("torchrun", signal.SIGTERM), ("workers", signal.SIGTERM)]
)
def test_a_signal_to_the_whole_process_group_saves_and_the_run_goes_on(
    tmp_path, weights, short_folder, launcher, number
):
    """Data workers, which the signal ends first, have real processes: they do not start in a fork."""
    write_tiny_run(tmp_path)
    (tmp_path / "data.py").write_text(WORKERS)
    started = [*TORCHRUN, "2", *PENSTOCK] if launcher == "torchrun" else list(PENSTOCK)
    of_data = ("data.files=[]", "data.source=data.py:batches") if launcher == "workers" else ()
    command = [*started, "train", "run.toml", *settings("pipeline.ranks=2", *OPTIONS, *of_data)]
    begin = partial(start, TMPDIR=short_folder) if launcher == "workers" else fork
    metrics = tmp_path / "run" / "metrics.jsonl"
    training = begin(command, tmp_path)
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, timeout_s=TIMEOUT_S)

    os.killpg(training.pid, number)
    printed, complained = training.communicate(timeout=TIMEOUT_S)

    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    [step] = checkpoints.steps()
    assert f"stopped by a signal after step {step}; its checkpoint is saved" in printed
    assert verify(checkpoints.of_step(step)).step == step < NUM_STEPS
    if launcher != "torchrun":
        assert (training.returncode, complained) == (130, "")
    again = begin(command, tmp_path)
    printed, complained = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, complained
    assert re.search(f"continuing after step {step} ", printed)
    assert [row["step"] for row in read_metrics(metrics)] == list(range(1, NUM_STEPS + 1))
    if launcher != "workers":
        assert (tmp_path / "run" / "weights.safetensors").read_bytes() == weights
