"""What a stage keeps is counted by storage: each once, parameters apart."""

import math

import pytest
import torch
from torch import nn

from penstock.execute.observing.footprint import SavedBytes, parameter_bytes
from penstock.execute.stages.stage import Stage

FLOAT = 4


def stage_of(index, *layers):
    return Stage(index, {f"{index}.{place}": layer for place, layer in enumerate(layers)})


def run(stages, *shape):
    saved = SavedBytes(stages)
    values = torch.ones(*shape, requires_grad=True)
    with saved.watching():
        for stage in stages:
            values = stage.forward((values,), {})
    return saved.largest, values


def test_parameters_are_counted_per_stage():
    stages = [stage_of(3, nn.Linear(4, 2)), stage_of(5, nn.Linear(2, 2, bias=False), nn.Tanh())]

    assert parameter_bytes(stages) == {3: FLOAT * (8 + 2), 5: FLOAT * 4}


def test_a_stage_keeps_what_its_layers_save_but_no_parameters():
    """A linear layer saves its input and its weight, the hyperbolic tangent its output."""
    largest, _ = run([stage_of(0, nn.Linear(4, 2), nn.Tanh())], 3, 4)

    assert largest == {0: FLOAT * (3 * 4 + 3 * 2)}


def test_a_storage_that_is_saved_twice_counts_once():
    class Squares(nn.Module):
        def forward(self, values):
            return values * values

    largest, _ = run([stage_of(0, Squares())], 5)

    assert largest == {0: FLOAT * 5}


def test_stages_are_told_apart_and_their_largest_forward_counts():
    stages = [stage_of(0, nn.Tanh()), stage_of(1, nn.Tanh())]
    saved = SavedBytes(stages)

    with saved.watching():
        for rows in (2, 7, 3):
            stages[0].forward((torch.ones(rows, requires_grad=True),), {})
        stages[1].forward((torch.ones(4, requires_grad=True),), {})

    assert saved.largest == {0: FLOAT * 7, 1: FLOAT * 4}


def test_gradients_are_the_same_and_nothing_is_watched_afterwards():
    stages = [stage_of(0, nn.Tanh())]
    values = torch.tensor([0.5], requires_grad=True)
    saved = SavedBytes(stages)

    with saved.watching():
        outputs = stages[0].forward((values,), {})
    outputs.sum().backward()
    stages[0].forward((torch.ones(99, requires_grad=True),), {})

    assert values.grad.item() == pytest.approx(1 - math.tanh(0.5) ** 2)
    assert saved.largest == {0: FLOAT}
    assert all(not layer._forward_pre_hooks for layer in stages[0].layers.values())
