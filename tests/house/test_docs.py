"""The documents say what is so: parity lists every feature once, and the README's file tree is real."""

import ast
import re
import tomllib

import pytest

from tests.house.source import ROOT, SOURCE, script

STATES = {"done", "partly", "not yet"}
PARITY = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
parity = script("parity")
IDS = (ROOT / "tests" / "data" / "feature_ids.txt").read_text(encoding="utf-8").split()


def rows(text):
    """Return the cells of every table row whose first cell looks like a feature's ID."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return [row for row in cells if re.fullmatch(r"[A-HX]\d+|0\.\d+", row[0])]


def wrong_rows(text):
    found = []
    for row in rows(text):
        if len(row) != 4:
            found.append(f"{row[0]}: {len(row)} cells; expected ID, behaviour, state, where tested")
        elif not row[1] or row[2] not in STATES:
            found.append(f"{row[0]}: state {row[2]!r}; expected one of {sorted(STATES)}, and a description")
        elif (row[2] == "not yet") == bool(row[3]):
            found.append(
                f"{row[0]}: {row[2]}, and its tests are {row[3]!r}; expected tests of what is there, and no others"
            )
    return found


def test_parity_lists_every_feature_exactly_once():
    assert sorted(row[0] for row in rows(PARITY)) == sorted(IDS)
    assert len(set(IDS)) == len(IDS)


def test_parity_names_a_state_and_tests_for_every_feature():
    found = wrong_rows(PARITY)
    assert not found, "\n" + "\n".join(found)


def test_parity_names_the_tests_that_say_which_features_they_show():
    tests = parity.tests_of_features()

    assert parity.page(PARITY, tests) == PARITY, "run: scripts/parity.py"
    assert tests.keys() <= set(IDS)


def test_the_features_of_a_test_are_those_of_its_marker():
    marked = '@pytest.mark.slow\n@pytest.mark.feature("A1", "0.4")\ndef test_x(): ...\n'
    helper = '@pytest.mark.feature("A2")\ndef x(): ...\n'
    page = "| A1 | step | done | |\n| A2 | step | not yet | `tests/old.py::test_y` |\n"

    assert [*parity.shown_in(marked + helper)] == [("A1", "test_x"), ("0.4", "test_x")]
    assert parity.page(page, {"A1": ["one", "two"]}) == "| A1 | step | done | one, two |\n| A2 | step | not yet | |\n"


@pytest.mark.parametrize(
    ("row", "num_wrong"),
    [
        ("| A1 | step | ready | |", 1),
        ("| A1 | step | done | |", 1),
        ("| A1 | step | not yet | `tests/test_x.py::test_y` |", 1),
        ("| A1 |  | not yet | |", 1),
        ("| A1 | step | not yet |", 1),
        ("| A1 | step | not yet | |", 0),
        ("| 0.4 | step | done | `tests/test_x.py::test_y`, `tests/test_x.py::test_z` |", 0),
    ],
)
def test_wrong_parity_rows_are_found(row, num_wrong):
    assert len(wrong_rows(row)) == num_wrong


def test_the_file_tree_of_the_readme_names_every_room():
    tree = README[README.index("## Where things are") :]
    rooms = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert [room for room in rooms if room.removesuffix(".py") not in tree] == []


def wrong_installs(text):
    """Lines that install another package, `penstock` of PyPI, or an extra that zsh takes for a glob."""
    pattern = re.compile(r"""pip install[^\n]*?[\s"'](?:torch-)?penstock\b|pip install[^\n"']*\s\.\[""")
    return [line for line in text.splitlines() if pattern.search(line)]


def test_nothing_tells_to_install_another_package():
    folders = [SOURCE, *(ROOT / name for name in ("docs", "examples", "bench", "changelog.d"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    files += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml")]

    found = {str(path.relative_to(ROOT)): wrong_installs(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        ("pip install penstock", True),
        ("pip install -U 'penstock[plot]'", True),
        ("python -m pip install torch-penstock", True),
        ("pip install numpy penstock", True),
        ("pip install .[plot]", True),
        ("pip install -e .[dev]", True),
        ("pip install .", False),
        ('pip install -e ".[dev]"', False),
        ("pip install '.[plot]' in Penstock's clone", False),
    ],
)
def test_wrong_installs_are_found(line, is_wrong):
    assert wrong_installs(line) == [line] * is_wrong


def test_the_distribution_has_a_name_of_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["name"] == "torch-penstock"
    assert list(project["scripts"]) == ["penstock"]
    assert (
        "torch-penstock[plot,tensorboard,tokenizers,transformers,peft,docs,completion,search]"
        in project["optional-dependencies"]["dev"]
    )


def missing_places(text):
    """What is named behind a file of execute/ and is not in it."""
    section = text.partition("### Where things happen\n")[2].partition("\n### ")[0]
    places = re.findall(r"`([\w/]+\.py)`(?: `([\w.]+)`)?", section)
    return [f"{file}: {name or 'no such file'}" for file, name in places if not _holds(file, name)]


def _holds(file, name):
    path = ROOT / file if file.startswith("tests/") else SOURCE / "execute" / file
    if not path.is_file():
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split(".") if name else ():
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def test_where_things_happen_is_so():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("### Where things happen\n")[2].partition("\n### ")[0]

    assert missing_places(text) == []
    for asked in ("a send is posted", "a gradient is accumulated", "an observer, such as one for debugging"):
        row = next(line for line in section.splitlines() if line.startswith(f"| {asked}"))
        assert re.search(r"`[\w/]+\.py` `[\w.]+`", row), row


@pytest.mark.parametrize("place", ["`run.py` `run_stop`", "`runs.py`", "`stages/tied.py` `TiedCopy.reduces`"])
def test_a_place_that_is_not_there_is_found(place):
    assert len(missing_places(f"### Where things happen\n\n| x | {place} |\n\n### More\n`gone.py`")) == 1
