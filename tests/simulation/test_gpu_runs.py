"""Iterations that others measured on GPUs, and what the simulator makes of the times of their ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "measured_gpu_1f1b.json"


def bench(*words):
    command = [sys.executable, str(ROOT / "bench" / "gpu_runs.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_all_16_published_iterations_on_gpus_are_predicted_within_1_6_percent(tmp_path):
    output = tmp_path / "rows.json"

    done = bench("--output", output)

    assert done.returncode == 0, done.stderr
    assert "16 of 16 within 1.6 %" in done.stdout
    rows = json.loads(output.read_text())
    assert len(rows) == 16
    for row in rows:
        assert row["simulated_s"] == pytest.approx(row["measured_s"], rel=0.016)
        assert row["slowest_s"] < row["simulated_s"]
        assert row["difference"] == pytest.approx(row["simulated_s"] / row["measured_s"] - 1)


@pytest.mark.slow
def test_a_run_that_is_further_off_is_named_and_is_status_1(tmp_path):
    measured = json.loads(DATA.read_text(encoding="utf-8"))
    measured["runs"][3]["iteration_ms"] *= 1.02
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(measured))

    done = bench("--data", changed)

    assert done.returncode == 1
    assert "15 of 16 within 1.6 %" in done.stdout
    assert [line.endswith("TOO FAR") for line in done.stdout.splitlines()[2:-1]].index(True) == 3
