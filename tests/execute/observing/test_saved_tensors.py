"""The tracker knows a saved tensor from the moment that autograd takes it until it lets go."""

import torch
from torch import nn

from penstock.execute.observing.saved_tensors import SavedTensorTracker, storages

FLOAT = 4


def ignore(tensor):
    """Take no note."""


def attempt(act, *args):
    return act(*args)


def total(tracker, stage):
    return sum(tracker.held(stage).values())


def test_what_a_forward_saves_is_held_until_its_backward():
    tracker = SavedTensorTracker([], note=ignore)

    with tracker.of_stage(2, attempt):
        output = torch.ones(5, requires_grad=True).tanh()
    held = total(tracker, 2)
    output.sum().backward()

    assert held == FLOAT * 5
    assert total(tracker, 2) == 0


def test_a_storage_saved_twice_counts_once_and_until_both_are_gone():
    tracker, values = SavedTensorTracker([], note=ignore), torch.ones(5, requires_grad=True)

    with tracker.of_stage(0, attempt):
        first, second = values * values, values * 2 * values
    assert total(tracker, 0) == FLOAT * (5 + 5)
    del first
    assert total(tracker, 0) == FLOAT * (5 + 5)
    del second
    assert total(tracker, 0) == 0


def test_stages_are_told_apart_and_parameters_left_out():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    tracker = SavedTensorTracker((parameter for layer in layers for parameter in layer.parameters()), note=ignore)
    outputs = []

    for stage, layer in enumerate(layers):
        with tracker.of_stage(stage, attempt):
            outputs.append(layer(torch.ones(2 + stage, 3, requires_grad=True)))

    assert [total(tracker, stage) for stage in (0, 1)] == [FLOAT * 6, FLOAT * 9]


def test_gradients_are_the_same_bit_for_bit():
    def gradient(tracker):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        values = torch.randn(3, 4, requires_grad=True)
        if tracker is None:
            output = model(values)
        else:
            with tracker.of_stage(0, attempt):
                output = model(values)
        output.square().sum().backward()
        return values.grad

    assert torch.equal(gradient(None), gradient(SavedTensorTracker([], note=ignore)))


def test_views_of_one_storage_count_once():
    values = torch.zeros(6)

    found = storages({"whole": values, "half": [values[:3]], "empty": torch.zeros(0), "other": torch.zeros(2)})

    assert sorted(found.values()) == [FLOAT * 2, FLOAT * 6]


def test_each_storage_that_is_new_to_a_stage_is_noted_once():
    noted = []
    tracker, inputs = SavedTensorTracker([], note=noted.append), torch.ones(5, requires_grad=True)

    with tracker.of_stage(0, attempt):
        outputs = [inputs.exp() * inputs]

    assert [tensor.numel() for tensor in noted] == [5, 5]
    outputs.clear()
    with tracker.of_stage(0, attempt):
        inputs.exp()
    assert len(noted) == 3


def test_what_no_backward_comes_by_is_gone_with_its_graph():
    """The exponential saves its own output."""
    tracker = SavedTensorTracker([], note=ignore)

    with tracker.of_stage(0, attempt):
        output = torch.ones(5, requires_grad=True).exp()
    del output

    assert tracker.held(0) == {}
