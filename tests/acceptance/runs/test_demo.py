"""`make demo` trains as its run file says: a few steps by default, all of them with `make test-full`."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.tiny_run import PENSTOCK, fork, settings

ROOT = Path(__file__).parents[3]
HELD_OUT_LOSS = 1.6284
"""Nats per byte, with the standard library of Python 3.11; other versions have other texts."""
TOLERANCE = 0.05
FEW = ("run.steps=4", "run.evaluate_every=2", "run.record_step=2", "batch.length=32", "optimizer.warmup_steps=1")


def demo_commands():
    """The words of the commands of `make demo`, by make's own account of what it would run."""
    command = ["make", "-n", "--no-print-directory", "demo"]  # without the word of a make that runs the tests
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in printed.strip().splitlines()]


def demo_arguments():
    """What `make demo` passes to penstock."""
    (found,) = [words[1:] for words in demo_commands() if words[0].endswith("/penstock")]
    return found


def test_the_demo_ends_with_how_to_call_penstock():
    *_, following, plain = demo_commands()

    assert following == ["echo", "Next: .venv/bin/penstock doctor runs/demo"]
    assert plain == ["echo", "For plain penstock in this shell: source .venv/bin/activate"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_trains(tmp_path, is_full):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    few = [] if is_full else settings(*FEW)
    (tmp_path / "tmp").mkdir()

    training = fork([*PENSTOCK, *demo_arguments(), *few], tmp_path)
    _, complained = training.communicate()

    assert training.returncode == 0, complained
    run = tmp_path / "runs" / "demo"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == (390 if is_full else 4)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {path.name for path in run.iterdir()} >= {"config.toml", "summary.json", "timeline.json"}
    if is_full:
        assert rows[-1]["held_out_loss"] == pytest.approx(HELD_OUT_LOSS, abs=TOLERANCE)
