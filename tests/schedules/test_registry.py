"""Families of other distributions: found by name when needed, one broken one harms no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.schedules import FAMILIES, build, find_family, installed_families, is_family_name
from penstock.schedules.registry import plug_ins
from tests.support.grids import assert_grid
from tests.support.plug_ins import ZIGZAG, installing

SIZE = {"ranks": 2, "microbatches": 2}
FAILING = "raise RuntimeError('no such driver')"


@pytest.fixture
def install(tmp_path, monkeypatch):
    with installing(tmp_path, monkeypatch) as install:
        yield install


@pytest.fixture
def zigzag(install):
    install("my-schedules", ["zigzag = my_schedules:FAMILY"], my_schedules=ZIGZAG)


@pytest.mark.usefixtures("zigzag")
def test_a_family_of_another_distribution_is_built_by_its_name():
    assert find_family("zigzag").summary == "forward, backward, in turn"
    assert_grid(build("zigzag", **SIZE), "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1")
    assert list(installed_families()[0]) == ["zigzag"]


@pytest.mark.usefixtures("zigzag")
def test_its_options_and_limits_are_those_of_any_family():
    assert_grid(build("zigzag", **SIZE, wrong=True), "0B0 0F0 0B1 0F1\n1B0 1F0 1B1 1F1")
    with pytest.raises(ConfigError, match=r"zigzag has no option 'wrnog'.*Did you mean 'wrong'"):
        build("zigzag", **SIZE, wrnog=True)
    with pytest.raises(ConfigError, match="zigzag takes 1 stage per rank, got 2"):
        build("zigzag", **SIZE, stages_per_rank=2)


@pytest.mark.feature("0.3")
@pytest.mark.usefixtures("zigzag")
def test_an_unknown_name_is_told_with_the_nearest_of_all():
    with pytest.raises(ConfigError, match=r"no schedule 'zigzog'; known: .*, zigzag\. Did you mean 'zigzag'"):
        find_family("zigzog")


def test_without_plug_ins_there_are_our_own():
    assert installed_families()[0] == {}
    assert [find_family(name) for name in FAMILIES] == list(FAMILIES.values())


@pytest.mark.parametrize(
    ("entry_point", "told"),
    [
        ("broken = failing:FAMILY", "failing.py:1: plug-in 'broken' of bad-one failed: RuntimeError: no such driver"),
        ("broken = nowhere:FAMILY", "plug-in 'broken' of bad-one failed: ModuleNotFoundError: No module named"),
        ("broken = good:NOTHING", "plug-in 'broken' of bad-one failed: AttributeError"),
        ("broken = good:NO_FAMILY", "plug-in 'broken' of bad-one is of type function; expected a"),
        ("broken = good:FAMILY", "plug-in 'broken' of bad-one holds a family named 'zigzag'; give both the same name"),
        ("1f1b = good:FAMILY", "plug-in '1f1b' of bad-one has the name of a family that comes with Penstock; give it"),
        ("a.b = good:FAMILY", "plug-in 'a.b' of bad-one has a name that is not of letters, digits, - and _; give it"),
        ("broken = wordless:FAMILY", "plug-in 'broken' of bad-one has None for its memory; give a text"),
    ],
)
def test_a_broken_plug_in_is_told_in_a_line_and_breaks_no_other(install, zigzag, entry_point, told):
    wordless = ZIGZAG.replace('memory="1"', "memory=None").replace('name="zigzag"', 'name="broken"')
    install("bad-one", [entry_point], failing=FAILING, good=ZIGZAG, wordless=wordless)
    name = entry_point.split(" = ")[0]

    installed, problems = installed_families()

    assert list(installed) == ["zigzag"]
    assert len(problems) == 1
    assert told in problems[0]
    assert "\n" not in problems[0]
    assert build("zigzag", **SIZE).name == "zigzag"
    assert build("1f1b", **SIZE).name == "1f1b"
    if name != "1f1b":
        with pytest.raises(ConfigError) as caught:
            build(name, **SIZE)
        assert str(caught.value) == problems[0]


def test_two_distributions_with_one_name_are_both_refused(install, zigzag):
    install("other-schedules", ["zigzag = other_schedules:FAMILY"], other_schedules=ZIGZAG)

    with pytest.raises(
        ConfigError, match="'zigzag' comes from other-schedules and my-schedules; uninstall all but one"
    ):
        build("zigzag", **SIZE)
    assert [*installed_families()[0]] == []
    assert len(installed_families()[1]) == 1


def test_a_distribution_that_is_there_twice_counts_once(install, zigzag):
    install("My-Schedules", ["zigzag = my_schedules:FAMILY"], my_schedules=ZIGZAG)

    assert [plug_in.name for plug_in in plug_ins()] == ["zigzag"]
    assert build("zigzag", **SIZE).name == "zigzag"


def test_a_distribution_with_a_garbled_file_is_passed_over(install, zigzag):
    install("garbled", ["this is no entry point"])

    assert list(installed_families()[0]) == ["zigzag"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("1 // 0", r"good\.py:\d+: zigzag failed: ZeroDivisionError"),
        ("yield '0F0 0B0'", "zigzag gave 1 rows for 2 ranks"),
        ("yield from ['0F0 0B0', '1F0 1B0']", "microbatches: zigzag made a schedule with 1, but 2 were asked for"),
        ("yield from ['0F0 0F1', '2F0 2F1 1F0 1F1']", "stages: zigzag made a schedule with 3, but 2 were asked for"),
    ],
)
def test_what_fails_in_a_plug_in_or_has_another_size_is_told(install, row, told):
    text = ZIGZAG.replace("for rank in range(shape.num_ranks):", f"{row}\n        for rank in ():")
    install("my-schedules", ["zigzag = good:FAMILY"], good=text)

    with pytest.raises(ConfigError, match=told):
        build("zigzag", **SIZE)


@pytest.mark.parametrize("text", ["mine.csv", "runs/mine", "./1f1b", "a.b.json", "/tmp/x", Path("1f1b"), None])
def test_paths_and_what_is_no_text_are_not_taken_for_names_and_ours_are(text):
    assert not is_family_name(text)
    assert all(map(is_family_name, FAMILIES))


@pytest.mark.parametrize(("name", "is_loaded"), [("1f1b", False), ("1f1bb", True)])
def test_distributions_are_searched_only_for_a_name_that_is_not_ours(name, is_loaded):
    program = (
        "import sys, penstock as ps\n"
        f"try: ps.build({name!r}, ranks=2, microbatches=2)\n"
        "except ps.ConfigError: pass\n"
        "print('importlib.metadata' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == f"{is_loaded}\n"
