"""Each rank's log is a file of the run folder, at the level that was asked for."""

import logging

from penstock.execute.observing.log import LOG
from penstock.train.folder.run_log import run_log


def said(folder):
    LOG.debug("a message")
    LOG.info("the plan")
    return [line.split(" ", 2)[2] for path in folder.glob("*.log") for line in path.read_text().splitlines()]


def test_a_level_writes_what_is_at_least_as_grave(tmp_path):
    (tmp_path / "info").mkdir()
    (tmp_path / "debug").mkdir()

    with run_log(tmp_path / "info", 0, "info"):
        info = said(tmp_path / "info")
    with run_log(tmp_path / "debug", 3, "debug"):
        debug = said(tmp_path / "debug")

    assert info == ["INFO the plan"]
    assert debug == ["DEBUG a message", "INFO the plan"]
    assert (tmp_path / "debug" / "rank3.log").exists()


def test_off_writes_nothing_and_nothing_is_left_behind(tmp_path):
    handlers, level = list(LOG.handlers), LOG.level

    with run_log(tmp_path, 0, "off"):
        pass
    with run_log(tmp_path, 1, "debug"):
        assert LOG.isEnabledFor(logging.DEBUG)

    assert (list(LOG.handlers), LOG.level) == (handlers, level)
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.log"]
