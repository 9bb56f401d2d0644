"""`penstock search`."""

import json
import re
import sys
from dataclasses import replace
from typing import get_args

import pytest

from penstock.cli import search as command
from penstock.cli.entry import main
from penstock.errors import ConfigError
from penstock.searching import question
from penstock.searching.result import Objective, Progress
from penstock.simulation import LayerCosts
from penstock.simulation.costs.writing import costs_to_toml

SIZE = ["--ranks", "4", "--microbatches", "8"]
SMALL = ["search", "--ranks", "2", "--microbatches", "4", "--seconds", "0"]
LIMITS = ["--sweep", "memory_limit=1..4microbatches"]
FIGURES = {
    "makespan_s", "span_s", "bubble_fraction", "bubble_rate", "lower_bound_s", "gap", "bound", "peak_bytes", "method",
    "seconds",
}  # fmt: skip
BYTES = "forward_s = 1\nbackward_input_s = 1\nbackward_weight_s = 1\nactivation_gib = 1\nparameter_gib = 2\n"


@pytest.fixture
def no_search(monkeypatch):
    """A refusal comes before the seconds of a search."""
    monkeypatch.setattr(command, "_search", lambda *_: pytest.fail("it searched"))


def test_the_command_takes_what_the_search_takes():
    """It does not import the search to say what it takes."""
    assert (*question.PLACEMENTS, question.ANY) == command.PLACEMENTS
    assert get_args(Objective) == command.OBJECTIVES


def test_a_table_says_that_no_order_is_shorter_and_tells_noise_beside_that_of_the_best_family(printed):
    options = ["--costs", "F=1,I=1.2,W=0.8,transfer=0.1", "--seconds", "0", "--noise", "0.05"]

    lines = dict(re.split("  +", line, maxsplit=1) for line in printed("search", *SIZE).splitlines())
    assert (lines["makespan"], lines["gap"]) == ("27 s", "0: no order is shorter")
    assert lines["lower bound"] == "27 s: begin and work of rank 3: begin 3 s + work 24 s"

    text = printed("search", *SIZE, *options)
    assert re.search(r"with noise +[\d.]+ s on average \(\+[\d.]+%\); \S+ [\d.]+ s \(\+[\d.]+%\)", text)

    found = json.loads(printed("search", *SIZE, *options, "--to", "json"))
    assert set(found) == FIGURES | {"noise"}
    assert found["noise"]["mean_s"] >= found["makespan_s"]


@pytest.mark.parametrize("sweep", [[], pytest.param(LIMITS, marks=pytest.mark.slow)])
def test_without_the_exact_solver_it_says_what_is_lost_and_how_to_install_it(sweep, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ortools", None)
    options = ["--costs", "F=1,I=2.3,W=0.8,transfer=0.4", *(sweep or ["--memory-limit", "3 microbatches"])]

    assert main(["search", *SIZE, "--seconds", "0", *options]) == 0
    assert "pip install '.[search]'" in capsys.readouterr().err

    assert main(["search", *SIZE, "--seconds", "1"]) == 0  # it is optimal
    assert capsys.readouterr().err == ""


def test_the_schedule_is_written_for_other_commands(tmp_path, refused):
    file = str(tmp_path / "mine.csv")
    limit = ["--memory-limit", "2 microbatches"]

    assert main(["search", *SIZE, "--placement", "v", *limit, "--seconds", "0", "--schedule", file]) == 0
    assert main(["check", file, *limit]) == 0
    assert "exists; give another name, or --force to replace it" in refused("search", *SIZE, "--schedule", file)


def test_costs_of_all_that_a_rank_does_are_shared_by_as_many_stages_as_other_costs_have_entries_for(tmp_path, printed):
    file = tmp_path / "costs.toml"
    file.write_text(f"forward_s = {[1] * 8}\nbackward_input_s = 4\nbackward_weight_s = 4\n")

    text = printed(*SMALL, "--placement", "loop", "--costs", str(file))
    assert "work 48 s" in text  # 4 F of 1 s and, shared by 4 stages, 4 s of I and W
    assert "work 144 s" in printed(*SMALL, "--placement", "loop", "--costs", str(file), "--per-action")


def test_costs_per_layer_are_added_up_for_the_stages(tmp_path, printed, refused):
    file = tmp_path / "costs.toml"
    layers = LayerCosts(forward=(1, 2, 3, 4, 5), backward_input=(1,) * 5, backward_weight=(1,) * 5)
    file.write_text(costs_to_toml(layers))

    text = printed("search", "--ranks", "2", "--microbatches", "4", "--costs", str(file), "--split", "3,2")
    assert "work 52 s" in text  # the F, I and W of two layers, for 4 microbatches

    given = (*SMALL, "--costs", str(file))
    assert "2,2,1 is for 3 stages, and 2 ranks take as many on each" in refused(*given, "--split", "2,2,1")
    assert "3,2 is for 2 stages, and 2 ranks take 2 on each" in refused(
        *given, "--split", "3,2", "--stages-per-rank", "2"
    )
    assert "line on 2 ranks" in printed(*given, "--split", "3,2", "--placement", "any")
    assert "has costs per layer, not per action; leave it out" in refused(*SMALL, "--costs", str(file), "--per-action")


@pytest.mark.parametrize(
    ("sweep", "name", "holds"),
    [
        ([], "found.json", b'"lower_bound_s": 13.0'),
        (["--per-action", "--theme", "dark"], "found.svg", b"#14161a"),
        (["--memory-limit", "2 microbatches"], "found.svg", b"within 2 microbatches, predicted with F=1,I=1,W=1"),
        (LIMITS, "front.txt", b"4 microbatches"),
        (LIMITS, "front.html", b"<td>4 microbatches: gap 0</td>"),
    ],
)
def test_the_result_goes_into_a_file_in_the_format_of_its_suffix(tmp_path, capsys, refused, sweep, name, holds):
    file = tmp_path / name
    file.write_text("old")

    assert f"{name} exists; give another name, or --force" in refused(*SMALL, *sweep, "-o", file)
    assert file.read_text() == "old"

    assert main([*SMALL, *sweep, "-o", str(file), "--force"]) == 0
    assert capsys.readouterr() == ("", "")
    assert holds in file.read_bytes()


# ---- a sweep


def test_a_limit_that_nothing_fits_is_a_row_that_says_why(tmp_path, printed, capsys):
    (tmp_path / "costs.toml").write_text(BYTES)
    sweep = [*SMALL, "--costs", str(tmp_path / "costs.toml"), "--sweep", "memory_limit=2GiB..4GiB"]

    table = printed(*sweep)
    assert table.splitlines()[2].startswith("4 GiB")
    assert "\nnothing fits:\n  2 GiB: no order was found that fits a limit of 2 GiB; with one microbatch" in table

    too_small, found = json.loads(printed(*sweep, "--to", "json"))
    assert set(found) == FIGURES | {"memory_limit"}
    assert too_small["error"].startswith("no order was found that fits a limit of 2 GiB")
    assert (too_small["makespan_s"], "error" in found, max(found["peak_bytes"])) == (None, False, 4 * 2**30)

    assert main([*sweep, "--to", "svg"]) == 0
    printed = capsys.readouterr()
    assert "4 GiB: gap 0" in printed.out
    assert printed.err.startswith("penstock: not in the picture: 2 GiB: no order was found")


@pytest.mark.parametrize("format", ["table", "json"])
def test_where_nothing_fits_at_all_the_status_is_1_and_all_reasons_are_said(tmp_path, capsys, format):
    (tmp_path / "costs.toml").write_text(BYTES)
    sweep = ["--costs", str(tmp_path / "costs.toml"), "--sweep", "memory_limit=1GiB..2GiB", "--to", format]

    assert main([*SMALL, *sweep]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith("penstock: nothing fits within any of these limits\n  1 GiB: no order was found")
    assert "\n  2 GiB: no order was found" in printed.err
    assert [row["makespan_s"] for row in json.loads(printed.out or "[]")] == [None, None] * (format == "json")


# ---- progress, and Ctrl-C


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, [2, 4]), (False, [])])
def test_progress_is_shown_every_two_seconds_where_somebody_looks_on(monkeypatch, capsys, is_terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    lines = command._ProgressLines("limit 8 GiB (1 of 2): ")

    for seconds in (1.0, 2.5, 3.0, 4.1):
        lines(Progress(seconds, 30.0, 27.0))

    assert capsys.readouterr().err.splitlines() == [
        f"penstock: limit 8 GiB (1 of 2): {seconds} s: best 30 s, bound 27 s, gap 11.11%" for seconds in shown
    ]


@pytest.fixture
def interrupt_at(monkeypatch):
    """Press Ctrl-C in a search in whose lines a text is; it ends with the best so far."""
    search = command._search

    def interrupt(text):
        def interrupted(*arguments):
            found = search(*arguments)
            return replace(found, was_interrupted=True) if text in arguments[-1] else found

        monkeypatch.setattr(command, "_search", lambda *given: interrupted(*given, *[""] * (4 - len(given))))

    return interrupt


def test_ctrl_c_writes_the_best_so_far(tmp_path, capsys, interrupt_at):
    interrupt_at("")
    files = [tmp_path / "found.json", tmp_path / "found.csv"]

    assert main([*SMALL, "-o", str(files[0]), "--schedule", str(files[1])]) == 130

    assert json.loads(files[0].read_text())["makespan_s"] == 13
    assert files[1].read_text().count("F") == 2 * 4
    assert capsys.readouterr().err == "penstock: interrupted; this is the best so far\n"


def test_ctrl_c_in_a_sweep_writes_the_limits_so_far(capsys, interrupt_at):
    interrupt_at("limit 2 microbatches (2 of 4)")

    assert main([*SMALL, "--sweep", "memory_limit=4,2,1,3microbatches"]) == 130

    printed = capsys.readouterr()
    assert [line[:14] for line in printed.out.splitlines()[2:4]] == ["4 microbatches", "2 microbatches"]
    assert printed.err == (
        "penstock: interrupted; the row of 2 microbatches is the best so far; "
        "not searched: 1 microbatches, 3 microbatches\n"
    )


@pytest.mark.parametrize("more", [[], LIMITS, [*LIMITS, "--to", "json"]])
def test_ctrl_c_before_anything_is_found_writes_nothing(monkeypatch, capsys, more):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_search", interrupt)

    assert main([*SMALL, *more]) == 130
    assert capsys.readouterr() == ("", "penstock: interrupted before an order was proved; nothing is written\n")


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["-o", "a.svg", "--to", "png"], 1, "the suffix of a.svg means svg, but --to is png"),
        (["--theme", "dark"], 1, "--theme: only for svg, png, html; leave it out for table"),
        (["--schedule", "a.megatron"], 1, "--schedule: a.megatron has none of the suffixes .csv, .json, .txt, .grid"),
        (["--schedule", "a.json", "-o", "./a.json"], 1, "--schedule: a.json is --output too; give each its own file"),
        (["--schedule", "a.csv", *LIMITS], 1, "--schedule: a sweep finds an order for each limit; search within one"),
        (
            ["--memory-limit", "4GiB", *LIMITS],
            1,
            "memory_limit is swept and given as --memory-limit too; leave",
        ),
        (
            ["--sweep", "memory_limit=8GiB..20GiB"],
            1,
            "--sweep: 8 GiB is a number of bytes, but the costs have no",
        ),
        (["--placement", "vee"], 2, "vee"),
        (["--memory-limit", "9"], 1, "have no activation_bytes"),
        (["--to", "png"], 1, "a terminal cannot show png; give --output NAME.png"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_search(
    tmp_path, monkeypatch, no_search, refused, arguments, status, words
):
    monkeypatch.chdir(tmp_path)
    if words.startswith("a terminal"):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert words in refused(*SMALL, *arguments, status=status)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--placement", "line", "--stages-per-rank", "2"], "line takes one stage a rank"),
        (["--costs", "F=1,B=2"], "is missing"),
        (["--sweep", "memory_limit=1..2microbatches", "--costs", "F=1,B=2"], "is missing"),
        (["--noise", "2"], "noise: "),
    ],
)
def test_what_cannot_be_searched_is_one_message(arguments, words, refused):
    assert words in refused(*SMALL, *arguments)


@pytest.mark.parametrize("arguments", [["--to", "svg"], [*LIMITS, "--to", "html"]])
def test_a_chart_without_matplotlib_is_refused_before_the_search(monkeypatch, no_search, refused, arguments):
    def missing():
        raise ConfigError("charts need matplotlib")

    monkeypatch.setattr("penstock.show.sheet.load_matplotlib", missing)

    assert "charts need matplotlib" in refused(*SMALL, *arguments)


def test_a_search_says_which_split_it_took_within_its_limit(tmp_path, printed, refused):
    path = tmp_path / "layers.toml"
    seconds = "".join(f"{name}_s = 1\n" for name in ("forward", "backward_input", "backward_weight"))
    path.write_text(f'per = "layer"\n{seconds}activation_bytes = [1, 1, 1, 1]\nparameter_bytes = [9, 1, 1, 1]\n')
    words = ["search", "--ranks", "2", "--microbatches", "2", "--costs", path, "--seconds", "0.1"]

    assert "split" not in printed(*words, "--memory-limit", "12")
    assert "split             split 1,3, in which an order fits\n" in printed(*words, "--memory-limit", "11")
    assert json.loads(printed(*words, "--memory-limit", "11", "--to", "json"))["split"] == [1, 3]
    assert "no order was found that fits a limit of 11; " in refused(*words, "--memory-limit", "11", "--split", "2,2")
    assert "fits a limit of 9, whatever the split; " in refused(*words, "--memory-limit", "9")
    assert "no order was found that fits a limit of 11; " in printed(*words, "--sweep", "memory_limit=11,12")
