"""Which format is wanted, and where a result goes."""

import io
import sys
from argparse import Namespace

import pytest

from penstock.cli.pictures import TABLE, Output, refuse_useless, wanted_format
from penstock.errors import ConfigError
from penstock.show import CHARTS, SUFFIXES


def asked(format=None, output=None, **others):
    return Namespace(format=format, output=output, **others)


def test_the_format_is_the_one_that_is_given_or_that_of_the_suffix():
    for format, output, expected in (
        (None, None, "grid"),
        ("png", None, "png"),
        (None, "a.svg", "svg"),
        (None, "folder/A.HTML", "html"),
        ("trace", "a.json", "trace"),
    ):
        assert wanted_format(asked(format, output), SUFFIXES, "grid") == expected
    for format, output, told in (
        (None, "a.jpg", r"--output: a\.jpg has none of the suffixes \.svg, \.png"),
        (None, "a", "give --to"),
        ("png", "a.svg", r"the suffix of a\.svg means svg, but --to is png"),
    ):
        with pytest.raises(ConfigError, match=told):
            wanted_format(asked(format, output), SUFFIXES, "grid")


def test_arguments_that_would_change_nothing_are_refused():
    refuse_useless(asked(theme=None), "theme", "trace", CHARTS)
    refuse_useless(asked(theme="dark"), "theme", "png", CHARTS)
    assert Output.of(asked("svg", theme="dark"), SUFFIXES, "grid", {"theme": CHARTS}) == Output("svg")
    with pytest.raises(ConfigError, match="--theme: only for svg, png, html; leave it out for trace"):
        refuse_useless(asked(theme="dark"), "theme", "trace", CHARTS)
    with pytest.raises(ConfigError, match="--theme: only for svg, png, html; leave it out for grid"):
        Output.of(asked(theme="dark"), SUFFIXES, "grid", {"theme": CHARTS})


def test_a_text_gets_its_last_line_end_and_no_screen_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = Output(TABLE, tmp_path / "a.txt")

    output.write("one line")

    assert (tmp_path / "a.txt").read_text() == "one line\n"
    assert output.screen.width is None
    assert Output(TABLE).screen.width


def test_a_terminal_gets_no_binary(monkeypatch, tmp_path):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO()))

    with pytest.raises(ConfigError, match=r"a terminal cannot show png; give --output NAME\.png"):
        Output("png").write(b"")
    Output("png", tmp_path / "a.png").require_displayable()
    Output(TABLE).require_displayable()
    Output("svg").write(b"<svg/>")
    assert sys.stdout.buffer.getvalue() == b"<svg/>"
