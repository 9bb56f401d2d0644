"""`python -m penstock`, the way in which ranks start."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_module_runs_the_command_line_and_ends_with_its_status():
    done = subprocess.run([sys.executable, "-m", "penstock", "no-such"], capture_output=True, text=True)

    assert done.returncode == 2
    assert "no-such" in done.stderr
