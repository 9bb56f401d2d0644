"""README.md is what a newcomer copies from: its first screen is short, its figures are real, its Python runs alone."""

import os
import re

import pytest

from tests.house.source import ROOT
from tests.support.forked_python import ForkedPython

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN_LINES, LIMIT_S = 45, 60
BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
BLOCKS = [(found[1], found[2]) for found in BLOCK.finditer(README)]
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT / "src"), "LC_ALL": "C.UTF-8"}


def blocks(tag):
    return [text for language, text in BLOCKS if language == tag]


def run(words, folder):
    """Run Python as a newcomer does: in an empty folder, with no settings but the search paths."""
    process = ForkedPython(words, folder, ENVIRONMENT)
    printed, complained = process.communicate(timeout=LIMIT_S)
    return process.returncode, printed, complained


def test_the_first_screen_ends_within_its_lines():
    first_screen = README.partition("\n## ")[0].rstrip()

    assert len(first_screen.splitlines()) <= FIRST_SCREEN_LINES
    for part in ("not yet run on several GPUs", "git clone", "make test", "pip install", "```python", "<picture>"):
        assert part in first_screen


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs_alone_and_under_torchrun_with_equal_losses(code, tmp_path):
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]

    alone, pair = (run(words, tmp_path) for words in (["train.py"], torchrun))

    assert (alone[0], pair[0]) == (0, 0), alone[2] + pair[2]
    assert re.fullmatch(r"loss \d\.\d{3}\n", alone[1])
    assert pair[1] == alone[1]


def test_blocks_that_do_not_run_say_why():
    others = [language for language, _ in BLOCKS if language not in ("python", "console", "")]

    assert blocks("python")
    assert blocks("console")
    assert others == ["sh not run: needs a package index"]
    assert [text for text in blocks("") if not re.search("Schedule|src/penstock/", text)] == []


@pytest.mark.slow
def test_the_codes_are_those_that_the_help_lists(tmp_path):
    table = README.partition("## Exit codes\n")[2].partition("\n## ")[0]
    text = run(["-m", "penstock", "--help"], tmp_path)[1].partition("Exit status:")[2]

    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == re.findall(r"\b\d+\b", text)


def test_make_has_the_commands_that_are_named():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", README))

    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_figures_are_those_of_the_page_of_measurements():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    names = {"torch.distributed.pipelining": "torch"}
    rows = re.findall(
        r"^\| ([\w.-]+)[ \d.]* \| ([\w-]+) \| ([\d.]+) ms \| ([\d.]+) MiB \|$",
        README,
        re.MULTILINE,
    )

    assert len(rows) == 6
    for system, family, decoder, peak in rows:
        steps = r"[\d.]+ \(.*?\) \| ([\d.]+) \(.*?\)"
        row = rf"\| {names.get(system, system)} \| {family} \| {steps} \| {peak} \| \d+ \|"
        (step,) = re.findall(row, page)
        assert round(float(step)) == int(decoder)
