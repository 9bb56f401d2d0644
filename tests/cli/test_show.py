"""`penstock show`."""

import json
import subprocess
import sys
import time

import pytest

from penstock.cli.entry import main
from penstock.ir.schedule import Schedule
from penstock.schedules import build

SHAPE = ["--ranks", "2", "--microbatches", "3"]


def printed_by(capsys, *arguments):
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_the_default_is_the_grid(capsys):
    rows = printed_by(capsys, "1f1b", *SHAPE).splitlines()

    assert any("0F0" in row and "0B2" in row for row in rows)
    assert len([row for row in rows if "F0" in row]) == 2


def test_csv_reads_back_as_the_same_schedule(capsys):
    text = printed_by(capsys, "gpipe", *SHAPE, "--format", "csv")

    assert [[str(action) for action in rank] for rank in Schedule.from_csv(text)] == [
        [str(action) for action in rank] for rank in build("gpipe", ranks=2, microbatches=3)
    ]


def test_json_reads_back_as_the_same_schedule(capsys):
    text = printed_by(capsys, "gpipe", *SHAPE, "--format", "json")

    assert json.loads(text)
    assert Schedule.from_json(text) == build("gpipe", ranks=2, microbatches=3)


@pytest.mark.parametrize("form", ["grid", "csv", "json"])
def test_the_lowered_program_sends(capsys, form):
    assert "SEND_F" in printed_by(capsys, "1f1b", *SHAPE, "--lowered", "--format", form)
    assert "SEND_F" not in printed_by(capsys, "1f1b", *SHAPE, "--format", form)


def test_options_reach_the_family(capsys):
    shape = ["--ranks", "4", "--microbatches", "6", "--format", "csv"]

    eager = printed_by(capsys, "1f1b", *shape, "--option", "warmup=eager")

    assert eager == build("1f1b", ranks=4, microbatches=6, warmup="eager").to_csv()
    assert eager != printed_by(capsys, "1f1b", *shape)


def test_forward_only_shows_no_backward(capsys):
    assert "B" not in printed_by(capsys, "1f1b", *SHAPE, "--forward-only", "--format", "csv")


def test_the_number_of_stages_is_passed_on(capsys):
    text = printed_by(capsys, "forward-only", *SHAPE, "--stages-per-rank", "2", "--format", "csv")

    assert "3F0" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["1f2b", *SHAPE], "1f1b"),
        (["1f1b", "--ranks", "0", "--microbatches", "3"], "ranks: 0"),
        (["1f1b", *SHAPE, "--option", "warmup"], "--option 'warmup' is not of the form key=value"),
        (["1f1b", *SHAPE, "--option", "warmpu=eager"], "Did you mean 'warmup'?"),
    ],
)
def test_wrong_input_is_one_message_and_status_1(capsys, arguments, told):
    assert main(["show", *arguments]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_schedule_is_shown_in_half_a_second_without_torch():
    program = (
        "import sys; from penstock.cli import main; main(['show', '1f1b', '--ranks', '8', '--microbatches', '32']);"
        "print(*sys.modules, file=sys.stderr)"
    )

    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert time.monotonic() - begin_s < 1.5, "0.5 s where nothing else runs"
    assert not {"torch", "numba", "matplotlib"} & set(done.stderr.split())
