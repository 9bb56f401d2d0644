"""One line where a silent command takes long in a terminal or waits for compiled loops, and none elsewhere."""

import io
import logging
import sys
import threading
from argparse import Namespace

import numpy as np
import pytest

from penstock.cli.waiting import compiling_reported, waiting_reported
from penstock.ir.hot import Hot

SHOW = Namespace(command="show", ranks=10_000, microbatches=20)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_timers():
    """Wait for timers that were started and not cancelled."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
            assert not thread.is_alive()


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


LINE = "penstock: compiling loops for large tables (once, some seconds) ...\n"
LOGGER = logging.getLogger("penstock.ir.hot")


def end_compiling(seconds):
    LOGGER.info("compiled", extra={"compiled_s": seconds})


def test_a_long_compilation_is_reported_while_it_lasts(capsys):
    with compiling_reported(0.0):
        LOGGER.info("compiling")
        run_timers()

        assert capsys.readouterr() == ("", LINE)


def test_a_short_compilation_is_not_reported(capsys):
    with compiling_reported(1000.0):
        LOGGER.info("compiling")
        end_compiling(1.0)
        run_timers()

    assert capsys.readouterr() == ("", "")


def test_several_short_compilations_are_reported_when_they_come_to_a_long_one(capsys):
    with compiling_reported(1000.0):
        LOGGER.info("compiling")
        end_compiling(1001.0)
        assert capsys.readouterr() == ("", "")
        LOGGER.info("compiling")
        run_timers()

    assert capsys.readouterr() == ("", LINE)


def test_it_is_reported_once(capsys):
    with compiling_reported(0.0):
        for _ in range(3):
            LOGGER.info("compiling")
            run_timers()
            end_compiling(1.0)

    assert capsys.readouterr() == ("", LINE)


def test_a_command_that_fails_leaves_nothing_behind(capsys):
    before = LOGGER.handlers[:], LOGGER.level

    def fail():
        LOGGER.info("compiling")
        raise KeyError

    with pytest.raises(KeyError), compiling_reported(1000.0):
        fail()

    run_timers()
    assert (LOGGER.handlers, LOGGER.level) == before
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_the_compilation_of_a_loop_is_reported(capsys):
    names = {}
    exec("def loop(column):\n    for row in range(len(column)):\n        column[row] *= 2", names)  # kept nowhere

    with compiling_reported(0.0):
        Hot(names["loop"]).compiled(np.ones(3))
        run_timers()

    assert capsys.readouterr() == ("", LINE)
