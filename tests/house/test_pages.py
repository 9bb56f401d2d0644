"""The pages of docs/ stay few and short, lead somewhere, and are found from the first one."""

import re
from pathlib import Path

import pytest

from tests.house.source import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "changelog.d/README.md")]
MAX_PAGES, MAX_LINES, MAX_WORDS, MAX_NOT_RUN = 57, 400, 30, 8
LANGUAGES = {"python", "console", "toml", "bash", "text", "py"}
"""`bash` is a file that a page makes; `py` is a signature in the generated reference, which is no code to run."""
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)


def is_reference(path):
    text = path.read_text(encoding="utf-8")
    return any(f"<!-- written by scripts/{name}.py -->" in text for name in ("reference", "families"))


def prose(text):
    """A page without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)


def anchors(text):
    """The anchors that GitHub and the site make of a page's headings; the second of a name gets -1."""
    seen, found = {}, set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def links(text):
    """Every link and picture of a page that leads to a file of the repository: (path, anchor)."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(r'(?:src|srcset|href)="([^"]+)"', prose(text))
    return [link.partition("#")[::2] for link in found if not re.match(r"https?:|mailto:", link)]


def broken_links(path):
    text = path.read_text(encoding="utf-8")
    found = []
    for target, anchor in links(text):
        place = (path.parent / target).resolve() if target else path
        if not place.exists():
            found.append(f"{path.relative_to(ROOT)}: {target} does not exist")
        elif anchor and place.suffix == ".md" and anchor not in anchors(place.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(ROOT)}: {target} has no heading #{anchor}")
    return found


def long_sentences(text):
    """Sentences with too many words; a cell of a table, an entry of a list and a heading end one too."""
    plain = re.sub(r"`[^`]*`", "code", prose(text))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    plain = re.sub(r"\n(?=\s*(?:[*\-|#]|\d+\.) ?)|\n\s*\n|\|", "\n\n", plain)
    sentences = re.split(r"(?<=[.!?:;])\s+|\n\n", plain)
    return [" ".join(each.split()) for each in sentences if len(re.findall(r"\w[\w'’-]*", each)) > MAX_WORDS]


def unnamed_files(text):
    """Files that a block is saved as, by a comment that no reader sees, but not by the paragraph before the block."""
    files = re.finditer(r"\n\n<!-- file: (\S+) -->", text)
    return [file[1] for file in files if f"`{file[1]}`" not in text[: file.start()].rpartition("\n\n")[2]]


def test_the_written_pages_are_few_and_none_is_long():
    written = [path for path in PAGES if not is_reference(path)]
    num_lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in written}

    assert len(written) <= MAX_PAGES, [str(path.relative_to(DOCS)) for path in written]
    assert {name: lines for name, lines in num_lines.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_the_reader_is_told_under_which_name_to_save_a_block(path):
    assert broken_links(path) == []
    assert unnamed_files(path.read_text(encoding="utf-8")) == []


def test_every_page_is_found_from_the_first_one():
    found, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            targets = [
                (page.parent / target).resolve() for target, _ in links(page.read_text(encoding="utf-8")) if target
            ]
            waiting += [target for target in targets if target in PAGES]

    assert [str(path.relative_to(DOCS)) for path in PAGES if path not in found] == []


def test_every_block_says_what_it_is():
    blocks = {str(path.relative_to(ROOT)): wrong_blocks(path.read_text(encoding="utf-8")) for path in PAGES}

    assert {name: wrong for name, wrong in blocks.items() if wrong} == {}


def wrong_blocks(text):
    """Blocks without a language, and commands that are not in a console block and so would not be run."""
    found = []
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        is_command = re.match(r"(?:\$ |penstock |python |pip |torchrun |make )", body)
        if language not in LANGUAGES or (language != "console" and is_command):
            found.append(f"{language!r}: {body.splitlines()[0]}")
        elif language == "console" and not body.startswith("$ "):
            found.append(f"no prompt: {body.splitlines()[0]}")
    return found


@pytest.mark.parametrize(
    "block", ["```\nx\n```", "```text\npenstock show x\n```", "```console\npenstock show\n```", "```sh\nls\n```"]
)
def test_a_block_that_would_not_be_run_is_found(block):
    assert len(wrong_blocks(f"# A page\n\n{block}\n")) == 1


def test_few_blocks_are_not_run():
    marks = [(path.name, mark) for path in [*PAGES, *OTHERS] for mark in not_run(path.read_text(encoding="utf-8"))]

    assert all(reason for _, reason in marks)
    assert len(marks) <= MAX_NOT_RUN, marks


def not_run(text):
    return re.findall(r"^(?:<!-- |```sh )not run: *(.*?) *(?:-->)?$", text, re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in (ROOT / "README.md", DOCS / "start.md") if path.exists()], ids=str)
def test_sentences_are_short(path):
    assert long_sentences(path.read_text(encoding="utf-8")) == []


def test_what_is_wrong_with_a_page_is_found():
    text = "# One\n\n```text\n# no heading [x](gone.md)\n```\n\n## One\n\n[a](#one-1) [b](#two) [c](gone.md)\n"

    assert anchors(text) == {"one", "one-1"}
    assert links(text) == [("", "one-1"), ("", "two"), ("gone.md", "")]
    assert links('<img src="gone.svg">') == [("gone.svg", "")]
    assert long_sentences("word " * 30 + "end. Short.") == [("word " * 30 + "end.").strip()]
    assert long_sentences("* " + "word " * 20 + "\n* " + "word " * 20) == []
    assert not_run("<!-- not run: two machines -->\n```sh not run: x y\n") == ["two machines", "x y"]
    assert unnamed_files("Save it as `a.py`:\n\n<!-- file: a.py -->\n\nAnd\nthis.\n\n<!-- file: b.py -->") == ["b.py"]


def test_a_page_outside_the_repository_has_broken_links_too(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.house.test_pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# Here\n[a](#here) [b](#there) [c](gone.md)\n", encoding="utf-8")

    assert broken_links(Path(tmp_path / "page.md")) == [
        "page.md:  has no heading #there",
        "page.md: gone.md does not exist",
    ]


def test_no_page_has_the_name_of_one_that_the_site_makes_itself():
    assert {path.stem for path in DOCS.glob("*.md")} & {"search", "genindex", "modindex"} == set()


def test_no_page_has_the_marks_of_a_merge_that_stopped():
    pages = [path for path in [*PAGES, *OTHERS] if re.search(r"^(<{7}|={7}|>{7})", path.read_text(), re.MULTILINE)]

    assert pages == []
