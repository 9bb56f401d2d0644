"""`--function FILE:NAME`: the function is found, and what is wrong with the file is one message."""

import json
import sys
from textwrap import dedent

import pytest

from penstock.errors import ConfigError, FormatError
from penstock.schedules import build
from penstock.train.settings.user_function import load_function

MINE = """
    from dataclasses import dataclass

    @dataclass
    class Step:
        rank: int
        text: "str"

    def mine(ranks, microbatches):
        return [Step(rank, f"{rank}F0 {rank}B0").text for rank in range(ranks)]

    def divide(ranks):
        yield "0F0"
        1 / 0

    ten = 10
    """


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a file, and return its name in the folder that we are in."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine.py"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return name

    return write


def test_a_function_is_found_and_makes_a_schedule_and_its_error_is_told_with_its_line(file):
    function, failing = (load_function(f"{file(MINE)}:{name}") for name in ("mine", "divide"))

    assert build(function, ranks=2, microbatches=1) == build("gpipe", ranks=2, microbatches=1)
    with pytest.raises(ConfigError, match=r"^mine\.py:14: divide failed: ZeroDivisionError: division by zero$"):
        build(failing, ranks=2, microbatches=1)


def test_modules_beside_the_file_are_found_and_the_path_is_left_as_it_was(file):
    file("WIDTH = 3", "beside_mine.py")
    file("from beside_mine import WIDTH\ndef width(): return WIDTH")
    before = list(sys.path)

    function = load_function("mine.py:width")

    assert function() == 3
    assert sys.path == before
    load_function(f"{file('def loads(): pass', 'json.py')}:loads")
    assert sys.modules["json"] is json, "a file hides no module of the same name"


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        (MINE, "mine.py:mien", r"mine\.py has no function 'mien'; its functions: mine, divide\. Did you mean 'mine'"),
        (MINE, "mine.py", r"'mine\.py' is not of the form FILE:NAME"),
        (MINE, ":mine", "is not of the form"),
        (MINE, "none.py:mine", r"none\.py: cannot be read \(No such file or directory\)\. Give the path of a Python"),
        ("x = 1\nimport nowhere_at_all", "mine.py:mine", r"^mine\.py:2: mine\.py failed: ModuleNotFoundError"),
        ("exit(3)", "mine.py:mine", r"mine\.py failed: SystemExit: 3"),
        ("x = 1\ndef f(:", "mine.py:f", r"mine\.py:2:7: not Python"),
        (b"\xff\xfe", "mine.py:f", r"mine\.py:\d+:\d+: not Python"),
        (b"x = 1\0", "mine.py:f", r"mine\.py:\d+:\d+: not Python: source code .* null bytes"),
    ],
)
def test_what_cannot_be_found_or_run_is_refused(file, text, place, told):
    file(text)

    with pytest.raises(FormatError if "not Python" in told else ConfigError, match=told):
        load_function(place)
