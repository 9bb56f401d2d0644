"""One file per layer serves any number of ranks, stages, microbatches and slices."""

import json
from dataclasses import replace

import pytest

from penstock.cli.entry import main
from penstock.errors import ConfigError, PartitionError
from penstock.planning import stage_costs
from penstock.schedules import build
from penstock.simulation import LayerCosts
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


SPLIT = replace(LAYERS, split=(2, 4))
"""A split that comes with the costs counts where it has as many stages."""


@pytest.mark.parametrize(
    ("costs", "shape", "expected"),
    [
        (LAYERS, {"ranks": 1}, {"forward_s": (21,), "channels": ()}),
        (LAYERS, {"ranks": 2}, {"forward_s": (10, 11), "channels": LAYERS.channels[:1]}),
        (LAYERS, {"ranks": 4}, {"forward_s": (3, 7, 5, 6), "channels": LAYERS.channels}),
        (LAYERS, {"name": "chimera"}, {"forward_s": (10, 11, 10, 11)}),
        (SPLIT, {}, {"forward_s": (3, 18)}),
        (SPLIT, {"name": "chimera"}, {"forward_s": (3, 18, 3, 18)}),
        (SPLIT, {"ranks": 4}, {"forward_s": (3, 7, 5, 6)}),
        (LayerCosts(activation_bytes=LAYERS.activation_bytes), {}, {"activation_bytes": (60, 150)}),
        (
            LAYERS,
            {"name": "seq1f1b", "slices": 2},  # a slice takes its share of a microbatch, but parameters are whole
            {
                "forward_s": (5, 5.5),
                "activation_bytes": (50, 55),
                "message_bytes": (4, 4),
                "parameter_bytes": (400, 200),
            },
        ),
    ],
    ids=str,
)
def test_stages_have_the_costs_of_the_layers_that_are_balanced_over_them(costs, shape, expected):
    found = stage_costs(costs, schedule(**shape))

    assert {name: getattr(found, name) for name in expected} == expected
    assert stage_costs(found, schedule(**shape)) is found


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
