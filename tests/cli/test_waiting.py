"""One line where a silent command takes long in a terminal or waits for compiled loops, and none elsewhere."""

import logging
import sys
import threading
from argparse import Namespace

import numpy as np
import pytest

from penstock.cli.waiting import compiling_reported, waiting_reported
from penstock.ir.hot import Hot
from tests.cli.terminal import Terminal

SHOW = Namespace(command="show", ranks=10_000, microbatches=20)


def run_timers():
    """Wait for timers that were started and not cancelled."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            assert thread.daemon, "it would keep a process from ending"
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "max_wait_s", "told"),
    [
        (SHOW, 0.0, "penstock: still at work on 10000 ranks and 20 microbatches ...; Ctrl-C ends it\n"),
        (Namespace(command="check"), 0.0, "penstock: still at work ...; Ctrl-C ends it\n"),
        (SHOW, 1000.0, ""),
        (Namespace(command="train", ranks=4), 0.0, ""),
        (Namespace(command="profile", ranks=4), 0.0, ""),
    ],
    ids=["with a shape", "without a shape", "a short wait", "train reports itself", "profile reports itself"],
)
def test_a_long_wait_of_a_silent_command_is_reported_while_it_lasts(monkeypatch, arguments, max_wait_s, told):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting_reported(arguments, max_wait_s):
        if max_wait_s == 0.0:
            run_timers()
            assert terminal.getvalue() == told
    run_timers()  # none is left

    assert terminal.getvalue() == told


LINE = "penstock: compiling loops for large tables (once, some seconds) ...\n"
LOGGER = logging.getLogger("penstock.ir.hot")


def end_compiling(seconds):
    LOGGER.info("compiled", extra={"compiled_s": seconds})


def test_a_long_compilation_is_reported_once_while_it_lasts_and_a_wait_in_no_terminal_not(capsys):
    with waiting_reported(SHOW, 0.0):
        run_timers()
    assert capsys.readouterr() == ("", "")

    with compiling_reported(0.0):
        for line in (LINE, "", ""):
            LOGGER.info("compiling")
            run_timers()
            assert capsys.readouterr() == ("", line)
            end_compiling(1.0)


def test_several_short_compilations_are_reported_when_they_come_to_a_long_one(capsys):
    with compiling_reported(1000.0):
        LOGGER.info("compiling")
        end_compiling(1001.0)
        assert capsys.readouterr() == ("", "")
        LOGGER.info("compiling")
        run_timers()

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
