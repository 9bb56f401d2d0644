"""Every benchmark can be started: what it imports of the package is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.mark.slow
def test_each_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])}

    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stderr
