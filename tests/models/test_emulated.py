"""Emulated layers take the time that they are given, and train like any other."""

import time

import pytest
import torch

from penstock.models.emulated import EmulatedLayer


def seconds_of(call):
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


@pytest.mark.slow
@pytest.mark.alone
def test_forward_and_backward_take_their_seconds():
    layer = EmulatedLayer(0.02, 0.05)
    outputs = []

    forward_s = seconds_of(lambda: outputs.append(layer(torch.ones(2, requires_grad=True))))
    backward_s = seconds_of(lambda: outputs[0].sum().backward())

    assert 0.02 <= forward_s < 0.04
    assert 0.05 <= backward_s < 0.07


def test_the_input_is_handed_on_and_the_weight_gets_a_gradient():
    layer = EmulatedLayer(0.0, 0.0)
    features = torch.tensor([1.0, 2.0], requires_grad=True)

    outputs = layer(features)
    (outputs * torch.tensor([3.0, 4.0])).sum().backward()

    assert outputs.tolist() == [1.0, 2.0]
    assert features.grad.tolist() == [3.0, 4.0]
    assert layer.weight.grad.item() == 7.0
