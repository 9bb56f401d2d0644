"""`python -m penstock`, the way in which ranks start."""

import errno
import os
import subprocess
import sys

import pytest

from penstock.cli import main


@pytest.mark.slow
def test_the_module_runs_the_command_line_and_ends_with_its_status():
    done = subprocess.run([sys.executable, "-m", "penstock", "no-such"], capture_output=True, text=True)

    assert done.returncode == 2
    assert "no-such" in done.stderr


CLOSED = """
import os, sys
for number in map(int, sys.argv[1].split()):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "penstock", *sys.argv[2:]])
"""


def run_without(streams, *arguments):
    """Run a command whose standard streams of these numbers are closed."""
    command = [sys.executable, "-c", CLOSED, streams, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_command_runs_without_standard_streams_and_what_it_writes_does_not_end_up_in_files(tmp_path):
    chart = tmp_path / "1f1b.csv"
    done = run_without("1", "schedules")
    assert (done.returncode, done.stderr) == (0, "")
    done = run_without("0 1 2", "convert", "--force", "-", str(chart))
    assert done.returncode == 1
    assert not chart.exists()

    done = run_without("0 1 2", "show", "1f1b", "--ranks=2", "--microbatches=2", "--output", str(chart))
    assert done.returncode == 0
    assert chart.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(("is_full", "what"), [(True, "standard output"), (False, "a file of this command")])
def test_a_write_without_a_name_is_blamed_on_standard_output_only_where_that_can_be_full(
    is_full, what, monkeypatch, capsys
):
    def refuse(arguments):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("penstock.cli.schedules.run_command", refuse)
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as pipe, open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full if is_full else pipe)
        status = main(["schedules"])

    assert status == 1
    assert capsys.readouterr().err == (
        f"penstock: {what} cannot be written: Disk quota exceeded. Free some space where it goes\n"
    )


@pytest.mark.slow
def test_a_standard_output_that_is_only_read_is_one_message():
    with open("/dev/null") as nothing:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "schedules"], stdout=nothing, stderr=subprocess.PIPE, text=True
        )

    assert done.returncode == 1
    assert done.stderr == (
        "penstock: standard output cannot be written: Bad file descriptor. "
        "It is not open for writing: redirect it to a file\n"
    )
