"""Commands print results, and complaints apart from them."""

import io
import os
import sys

import pytest

from penstock.cli.output import complain, forget_stdout, path_to_write, replace_unknown_characters, say, screen_of
from penstock.errors import ConfigError
from penstock.tables import Screen
from tests.cli.terminal import Terminal


def test_results_and_complaints_go_to_their_own_streams_and_forgotten_output_nowhere(capsys, tmp_path, monkeypatch):
    say("a result")
    say("ends its line\n")
    complain("a problem")
    assert capsys.readouterr() == ("a result\nends its line\n", "penstock: a problem\n")

    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        forget_stdout()
        os.write(file.fileno(), b"lost")
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(
    ("environment", "has_color"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_has_its_width_and_color_unless_unwanted_and_a_pipe_neither(monkeypatch, environment, has_color):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "30")

    assert screen_of(Terminal(), environment) == Screen(40, has_color, 30)
    assert screen_of(io.StringIO(), environment | {"FORCE_COLOR": "1"}) == Screen()


def test_characters_that_an_encoding_lacks_are_spelled(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)

    replace_unknown_characters()
    say("── 3 µs 语")

    file.flush()
    assert file.buffer.getvalue() == b"-- 3 us ?\n"


def test_bytes_that_cannot_be_read_are_not_spelled():
    replace_unknown_characters()

    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("utf-8", errors="spelled")


def test_a_path_to_write_is_free_or_forced_and_never_a_folder(tmp_path):
    (tmp_path / "there").touch()

    assert path_to_write(str(tmp_path / "new"), is_forced=False, key="OUT") == tmp_path / "new"
    assert path_to_write(str(tmp_path / "there"), is_forced=True, key="OUT") == tmp_path / "there"
    with pytest.raises(ConfigError, match=r"OUT: .*there exists; give another name, or --force"):
        path_to_write(str(tmp_path / "there"), is_forced=False, key="OUT")
    for name in (tmp_path, os.devnull):
        with pytest.raises(ConfigError, match="is not a regular file"):
            path_to_write(str(name), is_forced=True, key="OUT")
