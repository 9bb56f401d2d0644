"""Lines and bars on the terminal."""

import io
import re
from dataclasses import replace

import pytest

from penstock.tables import NO_SCREEN
from penstock.train.watching.progress import (
    Pace,
    ShareLines,
    StepMetrics,
    StepOutcome,
    duration_text,
    open_display,
    screen_of,
    step_line,
)
from tests.cli.terminal import Terminal

OUTCOME = StepOutcome(2.34567, 0.83, 3e-4)
METRICS = StepMetrics(7, OUTCOME, 2048, 0.1, bubble_fraction=0.1234, held_out_loss=2.5)
PACE = Pace(20480.0, 59.3)


def test_a_line_holds_every_number():
    line = step_line(METRICS, PACE, num_steps=600)

    assert line == (
        "step   7/600  loss 2.3457  held-out 2.5000  left 0:59   20,480 tokens/s  0.100 s/step  bubble 12.3%  "
        "lr 3.00e-04  norm 0.83"
    )


def test_what_was_not_measured_is_a_dash_or_left_out():
    line = step_line(StepMetrics(1, StepOutcome(2.0, 1.0, 1e-3), 10, 0.0), Pace(0.0, 0.0), num_steps=1)

    assert "bubble     -" in line
    assert "held-out" not in line
    assert "0 tokens/s" in line
    assert "left -  " in step_line(METRICS, replace(PACE, left_s=None), num_steps=600)
    for data_wait_s, is_part in ((0.0019, False), (0.0021, True)):
        waiting = replace(METRICS, outcome=replace(OUTCOME, data_wait_s=data_wait_s))
        assert ("data wait" in step_line(waiting, PACE, num_steps=600)) == is_part


def test_what_only_some_runs_have_is_at_the_end():
    more = {"predicted_bubble_fraction": 0.1, "peak_bytes": (2**20, 3 * 2**30), "num_skipped": 2}
    more["outcome"] = replace(OUTCOME, data_wait_s=0.025)

    line = step_line(replace(METRICS, **more), replace(PACE, utilization=0.412), num_steps=600)

    assert line.endswith(
        "norm 0.83  MFU 41.2%  memory 3.00 GiB  data wait 0.025 s  skipped 2  "
        "recorded: not in tokens/s; predicted bubble 10.0%"
    )


@pytest.mark.parametrize(("duration_s", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_durations_read_like_a_clock(duration_s, text):
    assert duration_text(duration_s) == text


@pytest.mark.parametrize("width", ["40", "250"])
def test_a_terminal_gets_one_line_in_place_and_whole_lines_above_it_and_a_pipe_those_that_stay(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    output, pipe = Terminal(), io.StringIO()
    assert (screen_of(output).width, screen_of(pipe)) == (int(width), NO_SCREEN)

    with open_display(pipe, 600) as display:
        display.show(METRICS, replace(PACE, left_s=60.0), stays=False)
        display.show(METRICS, PACE, stays=True)
    assert pipe.getvalue() == step_line(METRICS, PACE, num_steps=600) + "\n"

    with open_display(output, 600) as display:
        display.show(METRICS, PACE, stays=True)
        display.say("step 8 compiles the layers; that takes a while")
        for step in range(8, 20):
            display.show(replace(METRICS, step=step, held_out_loss=None), PACE, stays=False)

    assert step_line(METRICS, PACE, num_steps=600) in output.getvalue()
    assert "step 8 compiles the layers; that takes a while" in output.getvalue()
    lines = re.split(r"[\r\n]|\x1b\[[?\d]*[A-Za-z]", output.getvalue())
    live = [line for line in lines if line.startswith("step  19/600")]
    assert live
    assert all(len(line) <= int(width) for line in live)
    assert output.getvalue().count("\n") <= 3


def test_shares_of_a_long_preparation_are_told_every_five_seconds_and_of_a_short_one_never():
    output, seconds = io.StringIO(), iter([0.0, 1.0, 4.9, 5.0, 9.0, 10.5])
    lines = ShareLines(output, clock=lambda: next(seconds))

    for num_done in (10, 20, 30, 40, 200):
        lines.tell("tokenizing", num_done, 200)

    assert output.getvalue() == "tokenizing: 15%\ntokenizing: 100%\n"
