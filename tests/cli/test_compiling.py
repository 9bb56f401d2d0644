"""One line where a command waits for compiled loops, and none where it does not."""

import logging
import threading

import numpy as np
import pytest

from penstock.cli.compiling import compiling_reported
from penstock.ir.hot import Hot

LINE = "penstock: compiling loops for large tables (once, some seconds) ...\n"
LOGGER = logging.getLogger("penstock.ir.hot")


def run_timers():
    """Wait for timers that were started and not cancelled."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
            assert not thread.is_alive()


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
