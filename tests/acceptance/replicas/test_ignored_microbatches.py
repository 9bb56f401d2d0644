"""Replicas of layers in `fully_shard` exchange alike, also where other microbatches of theirs weigh nothing."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.local_pipelines import IGNORED, square_loss
from tests.support.replicas import (
    MICROBATCHES,
    NUM_REPLICAS,
    assert_gradients,
    batch,
    gradients_of,
    layers,
    mesh,
    own_rows,
    pipeline_of,
)


def train_masked(rank, ignored, reshards):
    """Microbatches that weigh nothing, by replica."""
    own_mesh = mesh()
    inputs, target = own_rows(own_mesh)
    for index in ignored[own_mesh.get_local_rank("replica")]:
        target.chunk(MICROBATCHES)[index].fill_(IGNORED)
    options = {"mesh": own_mesh["replica"], "reshard_after_forward": reshards}
    model = [fully_shard(layer, **options) for layer in layers()]
    pipeline = pipeline_of(model, "1f1b", own_mesh, loss=masked_loss, count=count_unmasked)
    pipeline.step(inputs, target=target)
    return gradients_of(pipeline)


def masked_loss(outputs, target):
    is_counted = target[:, 0] != IGNORED
    return square_loss(outputs[is_counted], target[is_counted])


def count_unmasked(target):
    return int((target[:, 0] != IGNORED).sum())


@pytest.mark.feature("E4")
@pytest.mark.parametrize(
    ("ignored", "reshards"), [(([3], [3]), None), (([3], []), None), (([1], [2]), True), (([0, 1, 2, 3], []), False)]
)
def test_replicas_exchange_alike_where_other_microbatches_weigh_nothing(four_ranks, ignored, reshards):
    results = four_ranks.run(train_masked, ignored, reshards)

    model = nn.Sequential(*layers())
    for indices, *rows in zip(ignored, *(tensor.chunk(NUM_REPLICAS) for tensor in batch()), strict=True):
        if counted := [index for index in range(MICROBATCHES) if index not in indices]:
            inputs, target = (torch.cat([tensor.chunk(MICROBATCHES)[index] for index in counted]) for tensor in rows)
            (square_loss(model(inputs), target) / NUM_REPLICAS).backward()
    assert_gradients(results, {name: parameter.grad for name, parameter in model.named_parameters()})
