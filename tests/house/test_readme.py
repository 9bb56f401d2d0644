"""README.md is what a newcomer copies from: its blocks run, its output and figures are real, its sentences short."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from tests.house.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN_LINES, MAX_WORDS, LIMIT_S = 45, 30, 60
BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
BLOCKS = [(found[1], found[2]) for found in BLOCK.finditer(README)]
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT / "src"), "LC_ALL": "C.UTF-8"}


def blocks(tag):
    return [text for language, text in BLOCKS if language == tag]


def run(words, folder):
    """Run a command as a newcomer does: in an empty folder, with no settings but the search paths."""
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)


def commands(text):
    """Yield each command of a console block with the output that is shown."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def long_sentences(text):
    """Sentences of more than 30 words, of prose and of list items; tables, code and addresses of links do not count."""
    prose = re.sub(r"<[^>]*>", "", BLOCK.sub("", text))
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#"))]
    paragraphs = re.split(r"\n\s*\n|\n(?=\* )", "\n".join(lines))
    sentences = [part for paragraph in paragraphs for part in re.split(r"(?<=[.!?:])\**\s", paragraph)]
    return [sentence for sentence in sentences if len(re.findall(r"\w\S*", sentence)) > MAX_WORDS]


def test_the_first_screen_ends_within_its_lines():
    first_screen = README.partition("\n## ")[0].rstrip()

    assert len(first_screen.splitlines()) <= FIRST_SCREEN_LINES
    for part in ("<picture>", "| Megatron-core", "pip install .", "$ penstock compare", "```python"):
        assert part in first_screen


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs_alone_in_an_empty_folder(code, tmp_path):
    done = run([sys.executable, "-c", code], tmp_path)

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d\.\d{3}\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("text", blocks("console"))
def test_commands_print_what_is_shown(text, tmp_path):
    for command, shown in commands(text):
        program, *words = command.split()
        assert program == "penstock"
        done = run([sys.executable, "-m", "penstock", *words], tmp_path)

        assert done.returncode == 0, done.stderr
        assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def test_blocks_that_do_not_run_say_why():
    others = [language for language, _ in BLOCKS if language not in ("python", "console", "")]

    assert blocks("python")
    assert blocks("console")
    assert others == ["sh not run: needs a package index"]
    assert [text for text in blocks("") if not re.search("Schedule|src/penstock/", text)] == []


@pytest.mark.slow
def test_the_codes_are_those_that_the_help_lists(tmp_path):
    table = README.partition("## Exit codes\n")[2].partition("\n## ")[0]
    text = run([sys.executable, "-m", "penstock", "--help"], tmp_path).stdout.partition("Exit status:")[2]

    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == re.findall(r"\b\d+\b", text)


def test_make_has_the_commands_that_are_named():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", README))

    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_no_sentence_is_long():
    assert long_sentences(README) == []


def test_a_long_sentence_is_found():
    assert len(long_sentences(f"{'word ' * 31}.\n\n* {'word ' * 31}.\n\n{'word ' * 29}.")) == 2


def test_figures_are_those_of_the_page_of_measurements():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    names = {"torch.distributed.pipelining": "torch"}
    rows = re.findall(
        r"^\| ([\w.-]+)[ \d.]* \| ([\w-]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) MiB \| (\d+) µs \|$",
        README,
        re.MULTILINE,
    )

    assert len(rows) == 6
    for system, family, emulated, decoder, peak, host in rows:
        steps = r"([\d.]+) \(.*?\) \| ([\d.]+) \(.*?\)"
        row = rf"\| {names.get(system, system)} \| {family} \| {steps} \| {peak} \| {host} \|"
        (found,) = re.findall(row, page)
        assert [round(float(value)) for value in found] == [int(emulated), int(decoder)]


@pytest.mark.slow
def test_pictures_are_what_their_script_draws(tmp_path):
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if importlib.metadata.version("matplotlib") != pinned[1]:
        pytest.skip("another matplotlib draws the same picture in other bytes")
    done = run([sys.executable, str(ROOT / "scripts" / "pictures.py"), "--output", str(tmp_path / "drawn")], tmp_path)

    assert done.returncode == 0, done.stderr
    for name in re.findall(r'(?:src|srcset)="docs/pictures/([\w-]+\.svg)"', README):
        assert (tmp_path / "drawn" / name).read_bytes() == (ROOT / "docs" / "pictures" / name).read_bytes()
