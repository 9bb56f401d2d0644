"""Costs per layer become costs per stage."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.simulation import Costs
from penstock.simulation.costs.costs import Channel, Spread
from penstock.simulation.costs.layers import costs_of_split

LAYERS = Costs(
    forward_s=(1.0, 2.0, 3.0, 4.0),
    backward_s=(2.0,),
    optimizer_s=(0.5,),
    message_bytes=(10, 20, 30, 40),
    activation_bytes=(5, 6, 7, 8),
    parameter_bytes=(100,),
    launch_s=0.25,
    channels=(Channel(0, 1, 2.0),),
    microbatch_compute_factor=(1.0, 2.0),
    spreads=(Spread(Kind.FORWARD, 0, 1.0, 0.1),),
)


def test_a_stage_costs_what_its_layers_cost_together():
    stages = costs_of_split(LAYERS, [1, 3])

    assert stages.forward_s == (1, 9)
    assert stages.backward_s == (2, 6)
    assert stages.optimizer_s == (0.5, 1.5)
    assert stages.activation_bytes == (5, 21)
    assert stages.parameter_bytes == (100, 300)


def test_a_stage_sends_what_its_last_layer_makes():
    assert costs_of_split(LAYERS, [1, 3]).message_bytes == (10, 40)
    assert costs_of_split(LAYERS, [2, 1, 1]).message_bytes == (20, 30, 40)


def test_what_belongs_to_no_layer_stays():
    stages = costs_of_split(LAYERS, [2, 2])

    assert (stages.launch_s, stages.channels, stages.microbatch_compute_factor) == (0.25, LAYERS.channels, (1.0, 2.0))
    assert stages.backward_input_s == ()
    assert stages.spreads == ()


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ([1, 2], "forward_s: 4 entries for 3 layers; give one per layer, or one for all"),
        ([4, 0], r"layers_per_stage: \[4, 0\]; give every stage a layer or more"),
        ([], r"layers_per_stage: \[\]; give every stage a layer or more"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, told):
    with pytest.raises(ConfigError, match=told):
        costs_of_split(LAYERS, split)
