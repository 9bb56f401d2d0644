"""The work of layers for any size of microbatches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.run_planning.model import PlannedModel
from penstock.run_planning.model_work import ModelWork
from penstock.sizing.layer_work import layer_work
from penstock.train.settings.sections import PrecisionSection

LENGTH = 128


def model():
    layers = [nn.Embedding(64, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 64)]
    return PlannedModel(
        layers, lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    )


def loss_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def works_of(layer, size):
    """Return the work of a layer as it is planned for, and as it is counted, and the lines that the former tells."""
    layers, lines = [nn.Embedding(256, 64), layer, nn.Linear(64, 256)], []
    planned = ModelWork(PlannedModel(layers, loss_of), LENGTH, lines.append).of(size, "none")
    counted = layer_work(layers, sequence_length=LENGTH, microbatch=size, loss=loss_of)
    return planned[1], counted[1], [line.partition(": ")[2] for line in lines]


def test_the_work_between_two_counts_is_that_which_would_be_counted():
    planned, counted, lines = works_of(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), 2)

    assert planned == counted
    assert lines == [f"microbatches of {size}, checkpointing none" for size in (1, 4)]


class Scores(nn.Module):
    """Each token looks at those of all sequences, so that bytes grow with the square of a microbatch."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(64, 192)

    def forward(self, hidden):
        query, key, value = self.heads(hidden.flatten(0, 1)).chunk(3, -1)
        return ((query @ key.T).softmax(-1) @ value).view_as(hidden)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_that_grow_faster_than_a_microbatch_are_not_planned_too_low(size):
    planned, counted, _ = works_of(Scores(), size)

    assert planned.activation_bytes >= counted.activation_bytes
    assert planned.forward.products == counted.forward.products
    assert planned.forward_workspace_bytes >= counted.forward_workspace_bytes


class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, hidden):
        return torch.stack([self.linear(sequence) for sequence in hidden])


def test_a_layer_that_runs_once_for_each_sequence_is_counted_for_each_size():
    planned, counted, lines = works_of(OneByOne(), 2)

    assert planned == counted
    assert lines[-1] == "microbatches of 2, checkpointing none"


def test_autocast_computes_in_its_type_and_keeps_weights_as_they_are():
    precision = PrecisionSection(compute="bfloat16", autocast=True)

    block = ModelWork(replace(model(), precision=precision), LENGTH, print).of(1, "none")[1]

    assert {product.data_type for product in block.forward.products} == {"bfloat16"}
    assert block.parameter_bytes == block.gradient_bytes == 4 * block.num_parameters


def test_each_count_is_made_once():
    lines = []
    work = ModelWork(model(), 8, lines.append)

    work.of(4, "none")
    work.of(2, "none")
    work.of(1, "none")

    assert len(lines) == 2


def test_operations_of_a_sequence_are_those_of_its_products():
    tokens, width = 8, 16 * 32 * 2 + 16 * 64
    flops = ModelWork(model(), tokens, lambda _: None).sequence_flops()

    assert flops == pytest.approx(3 * 2 * tokens * width)
