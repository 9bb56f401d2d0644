"""One file per layer serves any number of ranks, stages, microbatches and slices."""

import json
from dataclasses import replace

import pytest

from penstock.cli.entry import main
from penstock.errors import ConfigError, PartitionError
from penstock.planning import stage_costs
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel

LAYERS = LayerCosts(
    forward=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    backward_input=1.0,
    backward_weight=1.0,
    activation_bytes=[10, 20, 30, 40, 50, 60],
    message_bytes=8,
    parameter_bytes=100,
    channels=(Channel(0, 1, 0.5), Channel(2, 3, 0.25)),
)
FILE = 'per = "layer"\nforward_s = [1, 2, 3, 4, 5, 6]\nbackward_input_s = 1\nbackward_weight_s = 1\n'


def schedule(name="1f1b", ranks=2, **others):
    return build(name, ranks=ranks, microbatches=4, **others)


@pytest.fixture
def costs_file(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(FILE)
    return str(path)


def test_costs_per_stage_stay_as_they_are():
    costs = Costs.uniform()

    assert stage_costs(costs, schedule()) is costs


@pytest.mark.parametrize(("ranks", "forward_s"), [(1, (21,)), (2, (10, 11)), (4, (3, 7, 5, 6))])
def test_layers_are_balanced_over_the_stages_by_their_seconds(ranks, forward_s):
    assert stage_costs(LAYERS, schedule(ranks=ranks)).forward_s == forward_s


def test_both_copies_of_a_bidirectional_schedule_have_all_layers():
    assert stage_costs(LAYERS, schedule("chimera")).forward_s == (10, 11, 10, 11)


def test_a_split_that_comes_with_the_costs_counts_where_it_has_as_many_stages():
    costs = replace(LAYERS, split=(2, 4))

    assert stage_costs(costs, schedule()).forward_s == (3, 18)
    assert stage_costs(costs, schedule("chimera")).forward_s == (3, 18, 3, 18)
    assert stage_costs(costs, schedule(ranks=4)) == stage_costs(LAYERS, schedule(ranks=4))


def test_costs_without_seconds_are_split_evenly():
    costs = LayerCosts(activation_bytes=[10, 20, 30, 40, 50, 60])

    assert stage_costs(costs, schedule()).activation_bytes == (60, 150)


def test_channels_of_ranks_that_are_not_there_are_left_out():
    assert stage_costs(LAYERS, schedule(ranks=2)).channels == (Channel(0, 1, 0.5),)
    assert stage_costs(LAYERS, schedule(ranks=4)).channels == LAYERS.channels


def test_a_slice_takes_its_share_of_a_microbatch_but_parameters_are_whole():
    found = stage_costs(LAYERS, schedule("seq1f1b", slices=2))

    assert found.forward_s == (5.0, 5.5)
    assert (found.activation_bytes, found.message_bytes) == ((50, 55), (4, 4))
    assert found.parameter_bytes == (400, 200)


def test_more_stages_than_layers_and_an_unknown_number_of_layers_are_refused():
    with pytest.raises(PartitionError, match="the schedule has 8 stages, but the model has only 6 layers"):
        stage_costs(LAYERS, schedule("zbv", ranks=4))
    with pytest.raises(ConfigError, match="forward: one number for all layers does not say how many there are"):
        stage_costs(LayerCosts(forward=1.0), schedule())


@pytest.mark.parametrize("size", [(1, 1), (2, 4), (3, 12)], ids=str)
def test_compare_uses_one_file_at_any_size(size, costs_file, capsys):
    ranks, microbatches = size
    names = ["1f1b", "interleaved-1f1b:stages_per_rank=2", "chimera", "zbv", "seq1f1b:slices=2"]
    arguments = ["--ranks", str(ranks), "--microbatches", str(microbatches), "--costs", costs_file, "--to", "json"]

    main(["compare", *names, *arguments])

    found = [row for row in json.loads(capsys.readouterr().out) if "error" not in row]
    work_s = [(1 - row["bubble_fraction"]) * ranks * row["makespan_s"] for row in found]
    assert len(found) >= 3
    assert work_s == pytest.approx([microbatches * (21 + 6 + 6)] * len(found))


def test_rows_of_costs_per_layer_do_equal_work(costs_file, capsys):
    command = ["compare", "1f1b", "zbv", "--ranks", "2", "--microbatches", "4", "--costs", costs_file]

    assert main(command) == 0
    assert "is per layer, and a stage has the costs of its layers." in capsys.readouterr().out
    assert main([*command, "--per-action"]) == 1
    assert "--per-action: " in capsys.readouterr().err


def test_show_draws_with_a_file_per_layer(costs_file, capsysbinary):
    command = ["show", "zbv", "--ranks", "3", "--microbatches", "2", "--to", "trace", "--costs", costs_file]

    assert main(command) == 0
    assert b"traceEvents" in capsysbinary.readouterr().out
