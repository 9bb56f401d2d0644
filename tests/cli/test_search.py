"""`penstock search`."""

import json
from typing import get_args

import pytest

from penstock.cli import search as command
from penstock.cli.entry import main
from penstock.searching import asked
from penstock.searching.search import Objective
from penstock.simulation import LayerCosts
from penstock.simulation.costs.writing import costs_to_toml

SIZE = ["--ranks", "4", "--microbatches", "8"]


def test_a_table_says_how_long_it_takes_and_that_no_order_is_shorter(capsys):
    assert main(["search", *SIZE]) == 0

    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = {name.strip(): value.strip() for name, value in lines.items()}
    assert found["makespan"] == "27 s"
    assert found["lower bound"] == "27 s: begin and work of rank 3: begin 3 s + work 24 s"
    assert found["gap"] == "0: no order is shorter"


def test_the_command_takes_what_the_search_takes():
    """It does not import the search to say what it takes."""
    assert (*asked.PLACEMENTS, asked.ANY) == command.PLACEMENTS
    assert get_args(Objective) == command.OBJECTIVES


def test_json_has_all_figures(capsys):
    assert main(["search", *SIZE, "--costs", "F=1,I=1.2,W=0.8,transfer=0.1", "--to", "json", "--seconds", "1"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "makespan_s", "span_s", "bubble_fraction", "bubble_rate", "lower_bound_s", "gap", "bound", "peak_bytes",
        "method", "seconds",
    }  # fmt: skip
    assert found["makespan_s"] == pytest.approx(27.3)
    assert sum(found["bound"]["terms"].values()) == pytest.approx(found["lower_bound_s"])


def test_the_schedule_is_written_for_other_commands(tmp_path, capsys):
    file = str(tmp_path / "mine.csv")
    limit = ["--memory-limit", "2 microbatches"]

    assert main(["search", *SIZE, "--placement", "v", *limit, "--seconds", "0.5", "--schedule", file]) == 0
    assert main(["check", file, *limit]) == 0
    assert main(["search", *SIZE, "--schedule", file]) == 1
    assert "exists; give another name, or --force to replace it" in capsys.readouterr().err


def test_all_that_a_rank_does_is_shared_by_its_stages_unless_costs_are_of_an_action(capsys):
    def makespan(*more):
        assert main(["search", *SIZE, "--placement", "v", "--to", "json", "--seconds", "0", *more]) == 0
        return json.loads(capsys.readouterr().out)["makespan_s"]

    assert makespan("--per-action") == pytest.approx(2 * makespan())


def test_costs_per_layer_are_added_up_for_the_stages(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    layers = LayerCosts(forward=(1, 2, 3, 4, 5), backward_input=(1,) * 5, backward_weight=(1,) * 5)
    file.write_text(costs_to_toml(layers))

    assert main(["search", "--ranks", "2", "--microbatches", "4", "--costs", str(file), "--split", "3,2"]) == 0

    assert "work 52 s" in capsys.readouterr().out  # the F, I and W of two layers, for 4 microbatches


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["search", "--ranks", "4"], 2, "--microbatches"),
        (["search", *SIZE, "--placement", "vee"], 2, "vee"),
        (["search", *SIZE, "--memory-limit", "9"], 1, "have no activation_bytes"),
        (["search", *SIZE, "--memory-limit", "0 microbatches"], 1, "memory-limit"),
        (["search", *SIZE, "--placement", "line", "--stages-per-rank", "2"], 1, "line takes one stage a rank"),
        (["search", "--ranks", "0", "--microbatches", "8"], 1, "ranks: 0"),
        (["search", *SIZE, "--seconds", "-1"], 1, "seconds: -1.0"),
        (["search", *SIZE, "--costs", "F=1,B=2"], 1, "is missing"),
    ],
)
def test_bad_input_is_one_message(arguments, status, words, capsys):
    assert main(arguments) == status
    assert words in capsys.readouterr().err
