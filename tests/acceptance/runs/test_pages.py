"""Every block of the written pages runs, and its commands print what the page shows; pages.py and its marks work."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from tests.house.source import ROOT
from tests.support.page_ranks import ranks_of
from tests.support.pages import PageError, blocks_of, commands_of, difference_of, run_page

DOCS = ROOT / "docs"


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


ALL = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
# The pages of docs/moving are run by tests/moving/test_pages.py, on one process and on two.
PAGES = [name for name in ALL if blocks_of(text_of(name)) and not name.startswith("docs/moving/")]
QUICK = {
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("design", "index", "observing", "performance", "pipeline", "training")),
    *(f"docs/schedules/{name}.md" for name in ("bidirectional", "loop", "v")),
    *(f"docs/{name}.md" for name in ("explanations/split_backward", "recipes/clipping")),
}
"""Pages whose blocks run within a second; the others train, search or start processes."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PAGES]
)
def test_a_page_runs_and_prints_what_it_shows(name):
    assert difference_of(name) == ""


@pytest.mark.parametrize("name", ALL)
def test_pictures_exist_in_light_and_dark(name):
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text_of(name))

    assert [picture for picture in pictures if not (ROOT / name).parent.joinpath(picture).is_file()] == []
    light = {picture.removesuffix("-light.svg") for picture in pictures if picture.endswith("-light.svg")}
    dark = {picture.removesuffix("-dark.svg") for picture in pictures if picture.endswith("-dark.svg")}
    assert light == dark
    assert 2 * len(light) == len(set(pictures))


def test_there_are_20_tasks_or_more_and_each_names_its_page():
    rows = re.findall(r"^\| (?!I want to|---)(.+?) \| (.+) \|$", text_of("docs/tasks.md"), re.MULTILINE)

    assert len(rows) >= 20
    links = [re.findall(r"\]\(([^)]+)\)", pages) for _, pages in rows]
    assert all(links)


def page_with(language, text, *marks):
    return "".join(f"<!-- {mark} -->\n" for mark in marks) + f"```{language}\n{text}```\n"


@pytest.mark.parametrize(
    ("marks", "shown", "is_fine"),
    [
        ([], "one\ntwo\n", True),
        ([], "one\n", False),
        ([], "...\ntwo\n", True),
        ([], "...\nthree\n", False),
        ([], "", False),
        (["output varies"], "...\n", True),
    ],
)
def test_a_command_that_prints_something_else_is_found(tmp_path, marks, shown, is_fine):
    page = page_with("console", f"$ printf 'one\\ntwo\\n'\n{shown}", *marks)

    assert (run_page(page, tmp_path) == page) == is_fine


def test_a_line_that_only_a_first_use_prints_is_not_shown(tmp_path):
    page = page_with("console", "$ printf 'penstock: compiling loops (once) ...\\none\\n'\none\n")

    assert run_page(page, tmp_path) == page


def test_varying_numbers_are_not_compared_but_words_are(tmp_path):
    shown = page_with("console", "$ echo 'took 1.25 ms  of -3e4'\ntook 7 ms of 12\n", "numbers vary")

    assert run_page(shown, tmp_path) == shown
    assert run_page(shown.replace("took 7", "lost 7"), tmp_path) != shown.replace("took 7", "lost 7")


def test_numbers_that_are_shown_twice_are_printed_twice(tmp_path):
    page = page_with("console", "$ echo 1 0.25\n7 1.5\n$ echo 0.25\n1.5\n", "equal numbers")
    other = page.replace("$ echo 0.25", "$ echo 0.26")

    assert run_page(page, tmp_path) == page
    assert run_page(other, tmp_path) != other


def test_an_unexpected_exit_status_is_an_error(tmp_path):
    with pytest.raises(PageError, match="ended with 3, not 0"):
        run_page(page_with("console", "$ exit 3\n"), tmp_path)

    assert run_page(page_with("console", "$ exit 3\n", "exit status 3"), tmp_path)


def test_python_is_run_with_the_names_of_earlier_blocks_and_its_prints_are_compared(tmp_path):
    first = page_with("python", "x = 41\n")
    page = first + page_with("python", "print(x + 1)  # 42\n")

    assert run_page(page, tmp_path) == page
    assert "# 42" in run_page(page.replace("# 42", "# 43"), tmp_path)
    with pytest.raises(PageError, match="NameError: name 'x' is not defined"):
        run_page(first + page_with("python", "x\n", "alone"), tmp_path)


def test_printed_text_is_that_of_the_block_before(tmp_path):
    page = page_with("python", "for x in range(2):\n    print(x)\n") + page_with("text", "0\n1\n", "printed")

    assert run_page(page, tmp_path) == page
    assert run_page(page.replace("0\n1\n", "0\n2\n"), tmp_path) == page


def test_files_are_written_for_the_blocks_after_them(tmp_path):
    run_page(page_with("toml", "x = 1\n", "file: a/b.toml") + page_with("console", "$ cat a/b.toml\nx = 1\n"), tmp_path)

    assert (tmp_path / "a" / "b.toml").read_text() == "x = 1\n"


def test_what_cannot_run_here_is_left_out(tmp_path):
    page = page_with("console", "$ exit 1\n", "not run: it fails")
    page += page_with("python", "1 / 0\n", "needs the module not_installed_here")

    assert run_page(page, tmp_path) == page


def test_an_unknown_mark_is_an_error():
    with pytest.raises(PageError, match="unknown mark"):
        blocks_of(page_with("python", "", "numbers very"))


def test_commands_and_what_they_show_are_told_apart():
    text = "$ a |\n> b\nshown\n$ c\n"

    assert commands_of(text) == [("a |\nb", "shown\n"), ("c", "")]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py 3", (0, ["train.py", "3"])),
        ("torchrun --standalone --nproc-per-node 2 train.py", (2, ["train.py"])),
        ("penstock show 1f1b", (0, ["penstock", "show", "1f1b"])),
        ("penstock train run.toml", (0, ["penstock", "train", "run.toml"])),
        ("penstock show 1f1b > mine.txt", None),
        ("python -c 'print(1)'", None),
    ],
)
def test_scripts_are_told_from_other_commands(command, expected):
    assert ranks_of(command) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pictures_are_what_their_script_draws(tmp_path):
    pinned = re.search(r"^matplotlib==(.+)$", text_of("constraints.txt"), re.MULTILINE)
    if importlib.metadata.version("matplotlib") != pinned[1]:
        pytest.skip("another matplotlib draws the same picture in other bytes")
    script = [sys.executable, str(ROOT / "scripts" / "pictures.py"), "--output", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == {name for page in ALL for name in re.findall(r'pictures/([\w-]+\.svg)"', text_of(page))}
    assert [name for name in drawn if (tmp_path / name).read_bytes() != (DOCS / "pictures" / name).read_bytes()] == []
