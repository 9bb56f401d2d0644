"""Parameters may be DTensors: tensor-parallel layers get the gradients of one process under every schedule."""

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.local_pipelines import error_of, settle
from tests.support.replicas import (
    FLOAT,
    NUM_LAYERS,
    WIDTH,
    assert_gradients,
    batch,
    expected_gradients,
    gradients_of,
    mesh,
    pipeline_of,
)


def tensor_model():
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), nn.Tanh(), nn.Linear(WIDTH, WIDTH, dtype=FLOAT))
        for _ in range(NUM_LAYERS)
    ]
    return [settle(block, seed) for seed, block in enumerate(blocks)]


def train_tensor_parallel(rank, schedule, returns_tensor):
    own_mesh = mesh()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=returns_tensor)}
    model = [parallelize_module(block, own_mesh["replica"], plan) for block in tensor_model()]
    pipeline = pipeline_of(model, schedule, own_mesh)
    inputs, target = batch()
    if not returns_tensor:
        return str(error_of(pipeline.step, inputs, target=target))
    pipeline.memory_report(inputs, target=target)
    pipeline.step(inputs, target=target)
    return gradients_of(pipeline)


@pytest.mark.parametrize(
    "schedule", ["zb-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "interleaved-1f1b", "zbv"))]
)
def test_tensor_parallel_gradients_are_those_of_one_process(four_ranks, schedule):
    found = four_ranks.run(train_tensor_parallel, schedule, True)

    assert_gradients(found, expected_gradients(tensor_model(), seeds=(1, 1)))


def test_a_dtensor_between_stages_is_refused_with_the_fix(four_ranks):
    found = four_ranks.run(train_tensor_parallel, "1f1b", False)

    assert all("a DTensor of shape (4, 8) cannot travel between stages" in text for text in found)
    assert "to_local() or full_tensor()" in found[0]


def refused_ties(rank):
    own_mesh = mesh()
    found = []
    for schedule, options in (("1f1b", {"tied": [("0.0.weight", "3.0.weight")]}), ("chimera", {})):
        model = [parallelize_module(block, own_mesh["replica"], {"0": ColwiseParallel()}) for block in tensor_model()]
        found.append(str(error_of(pipeline_of, model, schedule, own_mesh, **options)))
    return found


def test_dtensors_that_several_stages_hold_are_refused(four_ranks):
    for texts in four_ranks.run(refused_ties):
        for text in texts:
            assert "is a DTensor, and held by several stages" in text
