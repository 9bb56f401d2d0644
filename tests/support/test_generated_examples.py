"""A full run explores other examples every time, repeats what failed before, and prints how to repeat it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**9))
def test_draws(number):
    with open({drawn!r}, "a") as file:
        print(number, file=file)

@given(st.integers(0, 10**9))
def test_fails(number):
    assert number < 1000
"""


def run(folder, profile):
    """Return the numbers that a run of the tests drew, and what it printed."""
    drawn = folder / "drawn"
    drawn.unlink(missing_ok=True)
    (folder / "tests" / "test_numbers.py").write_text(TESTS.format(drawn=str(drawn)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--hypothesis-profile={profile}"]
    done = subprocess.run([*command, "tests"], cwd=folder, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return drawn.read_text().split(), done.stdout


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    shutil.copy(CONFTEST, tmp_path / "tests" / "conftest.py")
    (tmp_path / "tests" / "emulated").mkdir()
    (tmp_path / "tests" / "emulated" / "fixtures.py").touch()  # which the conftest names
    return tmp_path


@pytest.mark.slow
def test_a_full_run_draws_other_examples_every_time_and_keeps_those_that_failed(folder):
    first, second = run(folder, "full"), run(folder, "full")

    # Hypothesis tries the bounds and round numbers in every run.
    assert len(set(first[0]) & set(second[0])) < 0.5 * len(first[0])
    assert all("@reproduce_failure(" in printed for _, printed in (first, second))
    assert any((folder / ".hypothesis" / "examples").rglob("*"))


@pytest.mark.slow
def test_a_quick_run_draws_the_same_examples_every_time(folder):
    first, second = run(folder, "quick"), run(folder, "quick")

    assert first[0] == second[0]
    assert not (folder / ".hypothesis" / "examples").exists()
