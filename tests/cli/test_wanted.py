"""A command line names the schedules that it wants: families, files, functions."""

import io
import sys

import pytest

from penstock.cli.arguments import Parser, add_one_schedule, add_schedules
from penstock.cli.wanted import find_schedules, make_named_schedule, parse_options
from penstock.errors import ConfigError, FormatError, ScheduleError
from penstock.lowering import lower
from penstock.schedules import build

SIZE = ["--ranks", "2", "--microbatches", "3"]
FILE = build("1f1b", ranks=2, microbatches=3)
MINE = """
def mine(ranks, microbatches, order="FB"):
    for rank in range(ranks):
        yield [f"{rank}{kind}{index}" for index in range(microbatches) for kind in order]
"""


def parsed(add, arguments):
    parser = Parser()
    add(parser)
    return parser.parse_args(arguments)


def wanted(*arguments):
    return make_named_schedule(parsed(add_one_schedule, arguments))


def all_wanted(*arguments):
    return find_schedules(parsed(add_schedules, arguments))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a schedule in several forms, and a function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.csv").write_text(FILE.to_csv())
    (tmp_path / "mine.json").write_text(FILE.to_json())
    (tmp_path / "lowered.csv").write_text(lower(FILE).to_csv())
    (tmp_path / "nameless").write_text(FILE.to_csv())
    (tmp_path / "gpipe").write_text(FILE.to_csv())
    (tmp_path / "drawing.txt").write_text("0F0 0F1 .   .   0B0 =   0F2 0B1 0B2\n.   1F0 1B0 =   1F1 1B1 1F2 1B2\n")
    (tmp_path / "wrong.csv").write_text("0B0,0F0\n1F0,1B0\n")
    return tmp_path


def test_options_are_read_as_text_with_dashes_as_underscores():
    assert parse_options(["backward-order = descending", "depth=2"]) == {"backward_order": "descending", "depth": "2"}


@pytest.mark.parametrize("texts", [["a=1", "a=2"], ["=1"], ["1a=2"], ["a"]])
def test_malformed_options_are_refused(texts):
    with pytest.raises(ConfigError):
        parse_options(texts)


def test_a_family_gets_its_shape_and_options_and_goes_before_a_file_of_the_same_name():
    assert wanted("gpipe", *SIZE) == build("gpipe", ranks=2, microbatches=3)
    assert wanted("1f1b", *SIZE) == FILE
    assert wanted("1f1b", *SIZE, "--set", "warmup=eager") == build("1f1b", ranks=2, microbatches=3, warmup="eager")
    assert wanted("forward-only", *SIZE, "--stages", "5") == build("forward-only", ranks=2, microbatches=3, stages=5)
    assert wanted("1f1b", *SIZE, "--forward-only").is_forward_only
    eager = build("1f1b", ranks=2, microbatches=3, warmup="eager")
    assert wanted("1f1b:warmup=eager", *SIZE) == eager
    assert wanted("forward-only:stages-per-rank=3", *SIZE, "--stages-per-rank", "2").num_stages == 6
    assert wanted("breadth-depth:slices=2,depth=3", *SIZE).num_slices == 2


@pytest.mark.parametrize("name", ["mine.csv", "mine.json", "lowered.csv", "nameless", "drawing.txt", "./gpipe", "-"])
def test_a_file_is_taken_as_it_is_without_its_communication(name, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(FILE.to_csv()))
    assert wanted(name) == FILE
    monkeypatch.setattr(sys, "stdin", io.StringIO(FILE.to_csv()))
    assert wanted(name, "--forward-only") == build("1f1b", ranks=2, microbatches=3, forward_only=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(FILE.to_csv()))
    assert wanted(name, *SIZE, "--stages-per-rank", "1", "--slices", "1", "--stages", "2") == FILE


def test_a_function_is_called_with_its_options():
    assert wanted("--function", "mine.py:mine", *SIZE).num_actions == 12
    assert wanted("--function", "mine.py:mine", *SIZE, "--set", "order=F").is_forward_only
    assert wanted("--function", "mine.py:mine:order=F", *SIZE).is_forward_only


def test_what_a_file_and_its_function_print_goes_to_standard_error(here, capsys):
    (here / "loud.py").write_text(f"print('loading')\n{MINE}    print('making')\n")

    assert wanted("--function", "loud.py:mine", *SIZE).num_actions == 12
    assert capsys.readouterr() == ("", "loading\nmaking\n")


@pytest.mark.parametrize(
    ("arguments", "place"),
    [(["./wrong.csv"], r"^\./wrong\.csv: the schedule breaks"), (["--function", "mine.py:mine:order=BF", *SIZE], "")],
)
def test_what_does_not_come_with_penstock_is_proved_and_named_as_it_was_given(arguments, place):
    with pytest.raises(ScheduleError, match=rf"(?s){place}.*runs before its forward"):
        wanted(*arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["1f2b", *SIZE], "no schedule '1f2b'.*Did you mean '1f1b'"),
        (["1f1b:warmup", *SIZE], "no schedule '1f1b:warmup'; options of 1f1b are written 1f1b:key=value"),
        (
            ["1f1b:warmup=eager", *SIZE, "--set", "warmup=standard"],
            "^warmup is given twice, 1f1b:warmup=eager and --set warmup=standard; keep one",
        ),
        (["1f1b:warmup=eager,x", *SIZE], "1f1b:'x' is not of the form key=value, such as 1f1b:warmup=eager"),
        (["1f1b:warmpu=eager", *SIZE], "Did you mean 'warmup'"),
        (["1f1b:slices=two", *SIZE], "slices: 'two' is not a number"),
        (["1f1b:ranks=3", *SIZE], "ranks: not an option of a schedule; use the argument of the command"),
        (["none.csv"], r"none\.csv: cannot be read"),
        (["mine.csv", "--ranks", "3"], r"ranks: 3 asked for, but mine\.csv has 2; a file keeps its own shape"),
        (["mine.csv", "--microbatches", "4"], "microbatches: 4 asked for, but"),
        (["mine.csv", "--stages", "3"], "stages: 3 asked for, but"),
        (["mine.csv", "--slices", "2"], "slices: 2 asked for, but"),
        (["mine.csv:warmup=eager"], "warmup: mine.csv is a file, which takes no options; leave out warmup=eager"),
        (["letter.txt"], r"letter\.txt:1:1"),
        (["--function", "mine.py:mien", *SIZE], "no function 'mien'"),
        (["mine.py", *SIZE], "mine.py is Python, which only --function runs: write --function mine.py:NAME instead"),
        (["mine.py:mine", *SIZE], "mine.py:mine is Python, .*: write --function mine.py:mine instead"),
        (["--function", "mine.py:mine:odrer=F", *SIZE], "Did you mean 'order'"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(here, arguments, told):
    (here / "letter.txt").write_text("dear reader,\n")

    with pytest.raises(FormatError if arguments == ["letter.txt"] else ConfigError, match=told):
        wanted(*arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give either NAME or --function"),
        (["1f1b", "--function", "mine.py:mine", *SIZE], "give either NAME or --function"),
        (["1f1b", "--ranks", "2"], "1f1b needs --ranks P and --microbatches M"),
        (SIZE, "give at least one NAME"),
    ],
)
def test_what_is_left_out_is_wrong_usage(arguments, told, capsys):
    find = all_wanted if "at least" in told else wanted
    with pytest.raises(SystemExit, match="2"):
        find(*arguments)
    assert told in capsys.readouterr().err


def test_several_are_found_before_any_is_made():
    found = all_wanted("gpipe:x=1", "mine.csv", *SIZE, "--function", "mine.py:mine")

    assert [each.text for each in found] == ["gpipe:x=1", "mine.csv", "mine.py:mine"]
    assert [each.is_built_in for each in found] == [True, False, False]
    with pytest.raises(ConfigError, match="no schedule '1f2b'"):
        all_wanted("gpipe:x=1", "1f2b", *SIZE)
