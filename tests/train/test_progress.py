"""Lines and bars on the terminal."""

import io

import pytest

from penstock.train.progress import StepMetrics, duration_text, open_display, step_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


METRICS = StepMetrics(7, 2.34567, 2048, 0.1, 3e-4, 0.83, bubble_fraction=0.1234, held_out_loss=2.5)


def test_a_line_holds_every_number():
    line = step_line(METRICS, num_steps=600, left_s=59.3)

    assert line == (
        "step   7/600  loss 2.3457   20,480 tokens/s  0.100 s/step  bubble 12.3%  lr 3.00e-04  norm 0.83  "
        "left 0:59  held-out 2.5000"
    )


def test_what_was_not_measured_is_a_dash_or_left_out():
    line = step_line(StepMetrics(1, 2.0, 10, 0.0, 1e-3, 1.0), num_steps=1, left_s=0)

    assert "bubble     -" in line
    assert "held-out" not in line
    assert "0 tokens/s" in line


@pytest.mark.parametrize(("duration_s", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_durations_read_like_a_clock(duration_s, text):
    assert duration_text(duration_s) == text


def test_a_pipe_gets_plain_lines_only():
    output = io.StringIO()

    with open_display(output, 2) as display:
        display.show("[one]", step=1)
        display.show("two", step=2)

    assert output.getvalue() == "[one]\ntwo\n"


def test_a_terminal_gets_whole_lines_and_a_bar():
    output = Terminal()
    line = "[x] " * 60

    with open_display(output, 2) as display:
        display.show(line, step=1)
        display.show("two", step=2)

    assert line in output.getvalue()
    assert "2/2" in output.getvalue()
