"""Emulated layers take the time that they are given, and train like any other."""

import time

import pytest
import torch

from bench.emulated_layer import EmulatedLayer
from penstock.execute.stages.stage import Stage
from tests.one_stage import OneStage


def seconds_of(call):
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def seconds_of_parts(layer, features):
    """How long each part of a backward in two parts takes."""
    stage = OneStage(Stage(0, {"0": layer}), is_split=True)
    saved = stage.saved(features)
    input_s = seconds_of(lambda: stage.backward_input(saved, torch.ones_like(features)))
    return input_s, seconds_of(lambda: stage.backward_weight(saved))


@pytest.fixture
def _warm():
    """The first backward of a process takes its time."""
    seconds_of_parts(EmulatedLayer(0.0, 0.0, weight_s=0.0), torch.ones(2))
    EmulatedLayer(0.0, 0.0)(torch.ones(2)).sum().backward()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("_warm")
def test_forward_and_backward_take_their_seconds():
    layer = EmulatedLayer(0.02, 0.05)
    outputs = []

    forward_s = seconds_of(lambda: outputs.append(layer(torch.ones(2, requires_grad=True))))
    backward_s = seconds_of(lambda: outputs[0].sum().backward())

    assert 0.02 <= forward_s < 0.04
    assert 0.05 <= backward_s < 0.07


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_each_part_of_a_backward_takes_its_seconds_even_if_no_input_needs_a_gradient(needs_gradient):
    features = torch.ones(2, requires_grad=needs_gradient)

    input_s, weight_s = seconds_of_parts(EmulatedLayer(0.0, 0.05, weight_s=0.02), features)

    assert 0.03 <= input_s < 0.05
    assert 0.02 <= weight_s < 0.03


@pytest.mark.parametrize("weight_s", [0.0, 1e-9])
def test_the_input_is_handed_on_and_the_weight_gets_a_gradient(weight_s):
    layer = EmulatedLayer(0.0, weight_s, weight_s=weight_s)
    features = torch.tensor([1.0, 2.0], requires_grad=True)

    outputs = layer(features)
    (outputs * torch.tensor([3.0, 4.0])).sum().backward()

    assert outputs.tolist() == [1.0, 2.0]
    assert features.grad.tolist() == [3.0, 4.0]
    assert layer.weight.grad.item() == 1.0 * 3.0 + 2.0 * 4.0
