"""Benchmarks can be started, and those that call parts of the package by themselves still fit them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


def run_python(code):
    """Run some lines with the benchmarks as modules."""
    path = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_each_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    run_python(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)")


@pytest.mark.slow
def test_instructions_of_a_split_schedule_are_measured_without_their_work():
    run_python(
        "import overhead\n"
        "overhead.NUM_REPETITIONS = 3\n"
        "times_s = overhead.instruction_times_s('zbv')\n"
        "assert len(times_s) == 2 and min(times_s) > 0, times_s"
    )


@pytest.mark.slow
def test_both_parts_of_a_backward_are_measured():
    run_python(
        "import torch, split_backward\n"
        "row = split_backward.measure(split_backward.TINY, torch.device('cpu'), 1)\n"
        "assert min(row.input_s + row.weight_s + row.whole_s) > 0, row"
    )
