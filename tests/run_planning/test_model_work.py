"""The work of layers for any size of microbatches."""

import pytest
import torch
from torch import nn

from penstock.run_planning.model import PlannedModel
from penstock.run_planning.model_work import ModelWork
from penstock.sizing.layer_work import layer_work


def model():
    layers = [nn.Embedding(64, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 64)]
    return PlannedModel(
        layers, lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    )


def test_the_work_for_more_sequences_is_that_which_would_be_counted():
    torch.manual_seed(0)
    the_model, lines = model(), []
    work = ModelWork(the_model, 8, lines.append)

    extrapolated = work.of(5, "none")

    counted = layer_work(the_model.layers, sequence_length=8, microbatch=5, loss=the_model.loss)
    for layer, expected in zip(extrapolated, counted, strict=True):
        assert layer.forward.products == expected.forward.products
        assert layer.backward_weight.products == expected.backward_weight.products
        assert layer.activation_bytes == expected.activation_bytes
        assert layer.parameter_bytes == expected.parameter_bytes
    assert [line.partition(": ")[2] for line in lines] == [
        f"microbatches of {size}, checkpointing none" for size in (1, 2)
    ]


def test_each_count_is_made_once():
    lines = []
    work = ModelWork(model(), 8, lines.append)

    work.of(4, "none")
    work.of(8, "none")

    assert len(lines) == 2


def test_operations_of_a_sequence_are_those_of_its_products():
    tokens, width = 8, 16 * 32 * 2 + 16 * 64
    flops = ModelWork(model(), tokens, lambda _: None).sequence_flops()

    assert flops == pytest.approx(3 * 2 * tokens * width)
