"""`--costs` and `--split` together, on every command that takes them, and the options of replicas."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from penstock.cli.entry import main
from penstock.cli.given_costs import (
    costs_of_replicas,
    costs_of_table,
    given_costs,
    read_split,
    replicas_of,
    sharding_of,
)
from penstock.errors import ConfigError
from penstock.lowering import NOT_SHARDED, Sharding
from penstock.schedules import build
from penstock.simulation import Costs
from penstock.simulation.costs.file import read_costs

LAYERS = """per = "layer"
split = [3, 4]
forward_s = [1, 4, 4, 4, 4, 3, 2]
backward_input_s = [1, 4, 4, 4, 4, 3, 2]
backward_weight_s = [1, 4, 4, 4, 4, 3, 2]
activation_bytes = [1, 2, 4, 8, 16, 32, 64]
"""
UNIT = Costs(forward_s=(1.0,), backward_input_s=(1.0,), backward_weight_s=(1.0,))
SIZE = ["--ranks", "2", "--microbatches", "4"]


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(LAYERS)
    return str(path)


@pytest.fixture
def schedule(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(build("1f1b", ranks=2, microbatches=4).to_json())
    return str(path)


def asked(split=None):
    return Namespace(split=split, per_action=False)


def test_costs_per_layer_get_the_split_that_is_given(costs):
    assert given_costs(asked(), costs) == read_costs(Path(costs))
    assert given_costs(asked("4,3"), costs).split == (4, 3)
    assert given_costs(asked(), "F=1,I=1,W=1") == UNIT


def test_a_table_gets_its_costs_and_the_name_of_their_split(costs):
    table = build("1f1b", ranks=2, microbatches=4)

    assert costs_of_table(asked(), "F=1,I=1,W=1", table) == (UNIT, "")
    for split, forward_s, told in ((None, (9, 13), "split 3,4"), ("2, 5", (5, 17), "split 2,5")):
        found, name = costs_of_table(asked(split), costs, table)
        assert (found.forward_s, name) == (forward_s, told)
    assert costs_of_table(asked(), costs, build("zbv", ranks=2, microbatches=4))[1] == "split 2,2,2,1"


@pytest.mark.parametrize("text", ["", "3,", "3,x", "0,7", "3.0,4", "\u0663,4"])
def test_what_is_no_split_is_refused(text):
    with pytest.raises(ConfigError, match=r"^--split: .*; expected the number of layers of each stage, such as 3,4$"):
        read_split(text)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ("4,4", "--split: [4, 4] adds up to 8 layers, but the costs have 7; make it add up to 7, or leave it out"),
        ("2,2,3", "--split: 2,2,3 is for 3 stages, but 1f1b has 2; give the layers of each stage, or leave it out"),
    ],
)
def test_a_split_that_does_not_fit_or_that_nothing_can_use_is_one_message(split, told, costs, schedule, refused):
    commands = {
        "F=1,I=1,W=1 has no costs per layer, so it cannot be split; give a f": ["compare", "1f1b", *SIZE],
        "there are no costs to split; give --costs FILE with costs per layer": ["check", schedule],
        "": ["show", "1f1b", *SIZE, "--to", "trace"],
    }
    for useless, words in commands.items():
        complained = refused(*words, "--costs", costs, "--split", split)
        assert len(complained.splitlines()) == 1
        assert told in complained
        assert not useless or f"--split: {useless}" in refused(*words, "--split", "3,4")
    told = "--split: only for svg, png, html, trace; leave it out for grid"
    assert told in refused("show", "1f1b", *SIZE, "--split", "3,4")


def test_every_command_says_which_split_it_shows(costs, schedule, printed):
    shown = []
    for words in (
        ["compare", "1f1b", "chimera", "zbv", *SIZE],
        ["show", "1f1b", *SIZE, "--to", "svg"],
        ["check", schedule],
    ):
        assert main([*words, "--costs", costs]) == 0
        shown.append(printed(*words, "--costs", costs, "--split", "4,3"))

    compared, picture, checked = shown
    assert "\n  split 3,4, as in the costs: 1f1b, chimera\n  split 2,2,2,1, balanced by the costs: zbv\n" in compared
    assert "\n  split 4,3, as given: 1f1b, chimera\n  split 2,2,2,1, balanced by the costs: zbv\n" in compared
    assert f"predicted with {costs}, split 3,4<" in picture
    assert f"predicted with {costs}, split 4,3<" in picture
    assert "peak bytes per rank 14 B, 120 B (" in checked  # of rank 0 two microbatches of layers 0 to 2
    assert [line for line in ("; split 3,4;", "; split 4,3;") if line not in checked] == []


def given(**options):
    return Namespace(**dict.fromkeys(("data", "shard", "residency", "look_ahead")) | options)


def test_options_are_those_of_lower_and_a_residency_of_0_is_all():
    costs = Costs.uniform(reduce_s=(1.0,))
    assert (sharding_of(given()), replicas_of(given(), 4)) == (NOT_SHARDED, None)
    assert costs_of_replicas(given(), costs) is costs
    assert sharding_of(given(shard="full")) == Sharding("full", 2, 1)
    assert sharding_of(given(shard="full", residency=3, look_ahead=0)) == Sharding("full", 3, 0)
    assert sharding_of(given(shard="full", residency=0)) == Sharding("full", None, 1)
    assert sharding_of(given(shard="optimizer", look_ahead=2)) == Sharding("optimizer", 2, 2)


def test_a_way_to_shard_alone_means_the_replicas_of_the_costs():
    assert replicas_of(given(shard="full"), 4) == 4
    assert replicas_of(given(shard="full", data=8), 4) == 8
    costs = Costs.uniform(parameter_bytes=(400,), replica_bandwidth_bytes_per_s=100.0, replicas=2)
    assert costs_of_replicas(given(shard="full"), costs).unshard_s == (2.0,)
    assert costs_of_replicas(given(data=4), costs).shards == 1
    assert costs_of_replicas(given(data=4, shard="optimizer"), costs).shards == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"residency": 2, "shard": "optimizer"}, "--residency: only for --shard full"),
        ({"look_ahead": 2}, "--look-ahead: only for --shard full or optimizer"),
        ({"residency": -1, "shard": "full"}, "--residency: -1; give a number of 1 or more, or 0 for all"),
        ({"shard": "ful"}, "--shard: 'ful' .*expected one of none, optimizer, full.*Did you mean 'full'"),
        ({"data": 0}, "--data: 0.*1 or more"),
    ],
)
def test_what_cannot_be_or_does_not_belong_together_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        costs_of_replicas(given(**{"data": 1} | options), UNIT)


# ---- ranks that take longer


def figures(printed, *words):
    """Return the makespan of each schedule of a comparison, by its name."""
    return {row["name"]: row["makespan_s"] for row in json.loads(printed("compare", *words, "--to", "json"))}


def test_a_heavy_rank_is_one_option_for_all_families_and_commands(printed):
    shape = ["all", "--ranks", "4", "--microbatches", "8"]
    listed = figures(printed, *shape, "--costs", "F=1,1,1,2,I=1,1,1,2,W=1,1,1,2")

    heavy = figures(printed, *shape, "--heavy", "3=2")

    assert heavy == listed
    assert None not in heavy.values()
    assert heavy["zbv"] > figures(printed, *shape)["zbv"]
    words = ["search", *SIZE, "--seconds", "0", "--to", "json"]
    found = [json.loads(printed(*words, *more))["makespan_s"] for more in ([], ["--heavy", "1=2"])]
    assert found[1] > found[0]
    words = ["show", "zbv", *SIZE, "--to", "trace"]
    assert printed(*words, "--heavy", "1=2") == printed(*words, "--costs", "F=1,2,2,1,I=1,2,2,1,W=1,2,2,1")
    assert "heavy 1=2" in printed("show", "zbv", *SIZE, "--to", "svg", "--heavy", "1=2")
    assert "F=1,I=1,W=1, heavy 3=2 is all that a rank does" in printed("compare", *shape, "--heavy", "3=2")


def test_costs_per_rank_are_shared_by_the_stages_of_a_rank_in_every_command(printed, tmp_path):
    (tmp_path / "ranks.toml").write_text("forward_s = [1, 3]\nbackward_input_s = 1\nbackward_weight_s = 1\n")
    (tmp_path / "zbv.csv").write_text(build("zbv", ranks=2, microbatches=4).to_csv())
    costs = ["--costs", str(tmp_path / "ranks.toml")]

    compared = figures(printed, "zbv", *SIZE, *costs)["zbv"]
    events = json.loads(printed("show", "zbv", *SIZE, *costs, "--to", "trace"))["traceEvents"]

    shown = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert shown == pytest.approx(1e6 * compared)
    assert "ok: 2 ranks, 4 stages" in printed("check", tmp_path / "zbv.csv", *costs)


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
@pytest.mark.parametrize("command", ["compare", "show", "search"])
def test_with_two_routes_a_heavy_rank_has_heavy_layers_on_both_ranks_that_have_them(name, command, printed):
    table = build(name, ranks=4, microbatches=8)
    heavy_costs, _ = costs_of_table(Namespace(split=None, heavy="0=2"), "F=1,I=1,W=1", table)
    heavy_stages = [stage for stage, forward_s in enumerate(heavy_costs.forward_s) if forward_s == 2]

    help_text = " ".join(printed(command, "--help").split())

    assert heavy_stages == [route[0] for route in table.placement.routes]
    assert sorted(table.placement.rank_of_stage[stage] for stage in heavy_stages) == [0, 3]
    assert (
        "with two routes, the factor is of the layers that the rank has on the first route, on both ranks" in help_text
    )


def test_of_costs_per_layer_layers_are_heavy(costs, printed, refused):
    words = ["1f1b", *SIZE, "--costs", costs]
    even, heavy = figures(printed, *words), figures(printed, *words, "--heavy", "6=3")

    assert heavy["1f1b"] > even["1f1b"]
    assert figures(printed, *words, "--heavy", "6=1") == even
    assert "--heavy: there is no layer 7; expected 0 to 6" in refused("compare", *words, "--heavy", "7=2")


@pytest.mark.parametrize(
    ("words", "heavy", "told"),
    [
        (["compare", "1f1b", *SIZE], "2=2", "--heavy: there is no rank 2; expected 0 to 1"),
        (["compare", "1f1b", *SIZE], "1=-2", "--heavy: '1=-2'; expected RANK=TIMES"),
        (["compare", "1f1b", *SIZE], "1=2,1=3", "--heavy: 1 is given twice; keep one"),
        (["compare", "1f1b", *SIZE, "--per-action"], "1=2", "--heavy: not with --per-action"),
        (["compare", "1f1b", "--microbatches", "4", "--sweep", "ranks=2..4"], "1=2", "--heavy: 1=2 names ranks; say w"),
        (["show", "1f1b", *SIZE], "1=2", "--heavy: only for svg, png, html, trace; leave it out for grid"),
        (
            ["compare", "zbv", *SIZE, "--costs", "F=1,2,1,1,I=1,W=1"],
            "1=2",
            "--heavy: 1=2 multiplies what ranks take, but f",
        ),
        (["search", *SIZE], "7=2", "--heavy: there is no rank 7; expected 0 to 1"),
    ],
)
def test_a_heavy_rank_that_cannot_be_is_one_message(words, heavy, told, refused):
    complained = refused(*words, "--heavy", heavy)

    assert len(complained.splitlines()) == 1
    assert told in complained
