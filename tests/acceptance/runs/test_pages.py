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


def console(command, shown, *marks):
    return page_with("console", f"$ {command}\n{shown}", *marks)


TWO = "printf 'one\\ntwo\\n'"
TWO_SHOWN = console(TWO, "one\ntwo\n")
VARYING = "echo 'took 1.25 ms  of -3e4'"
X_IS_41 = page_with("python", "x = 41\n")
LOOP = page_with("python", "for x in range(2):\n    print(x)\n")
LEFT_OUT = console("exit 1", "", "not run: it fails") + page_with("python", "1 / 0\n", "needs the module not_here")
SHOWN = {
    "the output": (TWO_SHOWN, TWO_SHOWN),
    "a line less": (console(TWO, "one\n"), TWO_SHOWN),
    "nothing": (console(TWO, ""), TWO_SHOWN),
    "any lines": (console(TWO, "...\ntwo\n"), console(TWO, "...\ntwo\n")),
    "any lines before another": (console(TWO, "...\nthree\n"), TWO_SHOWN),
    "any output": (console(TWO, "...\n", "output varies"), console(TWO, "...\n", "output varies")),
    "a line of the first use": (console("printf 'penstock: compiling loops (once) ...\\none\\n'", "one\n"),) * 2,
    "other numbers": (console(VARYING, "took 7 ms of 12\n", "numbers vary"),) * 2,
    "other words": (
        console(VARYING, "lost 7 ms of 12\n", "numbers vary"),
        console(VARYING, "took 1.25 ms  of -3e4\n", "numbers vary"),
    ),
    "a number twice": (console("echo 1 0.25\n7 1.5\n$ echo 0.25", "1.5\n", "equal numbers"),) * 2,
    "two numbers as one": (
        console("echo 1 0.25\n7 1.5\n$ echo 0.26", "1.5\n", "equal numbers"),
        console("echo 1 0.25\n1 0.25\n$ echo 0.26", "0.26\n", "equal numbers"),
    ),
    "what Python prints": (X_IS_41 + page_with("python", "print(x + 1)  # 42\n"),) * 2,
    "what Python does not print": (
        X_IS_41 + page_with("python", "print(x + 1)  # 43\n"),
        X_IS_41 + page_with("python", "print(x + 1)  # 42\n"),
    ),
    "text of the block before": (LOOP + page_with("text", "0\n1\n", "printed"),) * 2,
    "other text": (LOOP + page_with("text", "0\n2\n", "printed"), LOOP + page_with("text", "0\n1\n", "printed")),
    "what cannot run here": (LEFT_OUT, LEFT_OUT),
}


@pytest.mark.parametrize(("page", "expected"), SHOWN.values(), ids=SHOWN)
def test_a_page_gets_what_its_blocks_print_where_it_shows_something_else(tmp_path, page, expected):
    assert run_page(page, tmp_path) == expected


def test_an_unexpected_exit_status_is_an_error(tmp_path):
    with pytest.raises(PageError, match="ended with 3, not 0"):
        run_page(page_with("console", "$ exit 3\n"), tmp_path)

    assert run_page(page_with("console", "$ exit 3\n", "exit status 3"), tmp_path)


def test_a_block_alone_does_not_have_the_names_of_earlier_ones(tmp_path):
    with pytest.raises(PageError, match="NameError: name 'x' is not defined"):
        run_page(X_IS_41 + page_with("python", "x\n", "alone"), tmp_path)


def test_files_are_written_for_the_blocks_after_them(tmp_path):
    run_page(page_with("toml", "x = 1\n", "file: a/b.toml") + page_with("console", "$ cat a/b.toml\nx = 1\n"), tmp_path)

    assert (tmp_path / "a" / "b.toml").read_text() == "x = 1\n"


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
