"""Emulated layers take the time that they are given, and train like any other."""

import time

import pytest
import torch

from bench.emulated_layer import EmulatedLayer
from penstock.execute.stages.stage import Stage
from tests.support.one_stage import OneStage
from tests.support.rank_clocks import RankClocks


@pytest.fixture
def clock(monkeypatch):
    """The clock by which layers sleep."""
    clock = RankClocks()
    monkeypatch.setattr("bench.emulated_layer.time", clock)
    return clock


def seconds_of(clock, call):
    begin_s = clock.monotonic()
    call()
    return clock.monotonic() - begin_s


def test_forward_and_backward_take_their_seconds(clock):
    layer = EmulatedLayer(0.02, 0.05)
    outputs = []

    forward_s = seconds_of(clock, lambda: outputs.append(layer(torch.ones(2, requires_grad=True))))
    backward_s = seconds_of(clock, lambda: outputs[0].sum().backward())

    assert (forward_s, backward_s) == pytest.approx((0.02, 0.05))


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_each_part_of_a_backward_takes_its_seconds_even_if_no_input_needs_a_gradient(clock, needs_gradient):
    features = torch.ones(2, requires_grad=needs_gradient)
    stage = OneStage(Stage(0, {"0": EmulatedLayer(0.0, 0.05, weight_s=0.02)}), is_split=True)
    saved = stage.saved(features)

    input_s = seconds_of(clock, lambda: stage.backward_input(saved, torch.ones_like(features)))
    weight_s = seconds_of(clock, lambda: stage.backward_weight(saved))

    assert (input_s, weight_s) == pytest.approx((0.03, 0.02))


def test_layers_sleep_by_the_clock_of_the_machine():
    begin_s = time.monotonic()

    EmulatedLayer(0.02, 0.0)(torch.ones(2))

    assert time.monotonic() - begin_s >= 0.02


@pytest.mark.parametrize("weight_s", [0.0, 1e-9])
def test_the_input_is_handed_on_and_the_weight_gets_a_gradient(weight_s):
    layer = EmulatedLayer(0.0, weight_s, weight_s=weight_s)
    features = torch.tensor([1.0, 2.0], requires_grad=True)

    outputs = layer(features)
    (outputs * torch.tensor([3.0, 4.0])).sum().backward()

    assert outputs.tolist() == [1.0, 2.0]
    assert features.grad.tolist() == [3.0, 4.0]
    assert layer.weight.grad.item() == 1.0 * 3.0 + 2.0 * 4.0
