"""One line where a silent command takes long in a terminal, and none elsewhere."""

import io
import sys
import threading
from argparse import Namespace

import pytest

from penstock.cli.waiting import waiting_reported

SHOW = Namespace(command="show", ranks=10_000, microbatches=20)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_timers():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)


def test_a_long_wait_is_reported_while_it_lasts(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting_reported(SHOW, 0.0):
        run_timers()

    assert terminal.getvalue() == ("penstock: still at work on 10000 ranks and 20 microbatches ...; Ctrl-C ends it\n")


def test_a_command_without_a_shape_says_less(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting_reported(Namespace(command="check"), 0.0):
        run_timers()

    assert terminal.getvalue() == "penstock: still at work ...; Ctrl-C ends it\n"


def test_a_short_wait_is_not_reported_and_leaves_no_timer(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting_reported(SHOW, 1000.0):
        pass
    run_timers()

    assert terminal.getvalue() == ""


@pytest.mark.parametrize("command", ["train", "profile"])
def test_commands_that_report_themselves_get_no_line(monkeypatch, command):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting_reported(Namespace(command=command, ranks=4), 0.0):
        run_timers()

    assert terminal.getvalue() == ""


def test_a_log_gets_no_line(capsys):
    with waiting_reported(SHOW, 0.0):
        run_timers()

    assert capsys.readouterr() == ("", "")
