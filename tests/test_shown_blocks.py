"""What the reference, the schedules and the explanations show runs, and prints what they say that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

# Their Python and commands need one process; other pages have tests of their own, which start ranks.
PAGES = ["index", "schedules", "design", "simulator", "pictures", "performance", "training", "reference/file_formats"]
PAGES += [f"schedules/{path.stem}" for path in sorted((ROOT / "docs" / "schedules").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- not run: .* -->\n)?```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text, language):
    return [body for not_run, found, body in BLOCK.findall(text) if found == language and not not_run]


def commands(text):
    """Split console blocks into (command, what it prints)."""
    parts = [part for body in blocks(text, "console") for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]]
    return [part.partition("\n")[::2] for part in parts]


def is_as_shown(shown, printed):
    """Whether a text is what is shown, where a line `...` stands for any lines."""
    pattern = r"(?:.*\n)*?".join(re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE))
    return re.fullmatch(pattern, printed) is not None


def run(arguments, folder):
    paths = {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        arguments, cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_runs_in_its_order(name, folder):
    code = "\n".join(blocks((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), "python"))

    done = run([sys.executable, "-c", code], folder)

    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [shown for shown in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE) if shown not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_print_what_it_shows(name, folder):
    for command, shown in commands((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")):
        done = run(["bash", "-c", command], folder)

        assert done.returncode == 0, f"{command}\n{done.stderr}"
        printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        assert is_as_shown(shown, printed), f"{command}\n{printed}"


def test_blocks_and_commands_are_taken_apart():
    text = "```console\n$ a b\none\n...\n$ c\n```\n\n<!-- not run: why -->\n```console\n$ d\n```\n```text\n$ e\n```\n"

    assert commands(text) == [("a b", "one\n...\n"), ("c", "")]


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("one\n", "one\n", True),
        ("one\n", "one\ntwo\n", False),
        ("...\n", "one\ntwo\n", True),
        ("one\n...\n", "one\n", True),
        ("...\nthree\n", "one\ntwo\n", False),
        ("", "one\n", False),
    ],
)
def test_three_dots_stand_for_any_lines(shown, printed, fits):
    assert is_as_shown(shown, printed) == fits
