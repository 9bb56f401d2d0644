"""Parameters may be DTensors: tensor-parallel layers get the gradients of one process under every schedule."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock.errors import PipelineError
from penstock.execute.dtensor import is_dtensor, local_part
from penstock.execute.memory_order import written_out
from tests.local_pipelines import error_of, settle
from tests.ranks import RankPool, run_ranks
from tests.replicas import (
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


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4) as pool:
        yield pool


def look_at_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    gathered = (sharded + 1).redistribute(placements=sharded.placements)
    with pytest.raises(PipelineError, match="cannot travel between stages"):
        written_out(sharded)
    part = local_part(gathered)
    return is_dtensor(sharded), type(part).__name__, part.tolist(), part.requires_grad


def test_the_local_part_of_a_dtensor_is_a_plain_tensor_without_a_graph():
    assert run_ranks(2, look_at_dtensor) == [(True, "Tensor", [1.0, 2.0], False), (True, "Tensor", [3.0, 4.0], False)]


def test_a_plain_tensor_is_its_own_part():
    tensor = torch.ones(2)

    assert not is_dtensor(tensor)
    assert local_part(tensor) is tensor


# ---- tensor parallelism


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


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
def test_tensor_parallel_gradients_are_those_of_one_process(four_ranks, schedule):
    found = four_ranks.run(train_tensor_parallel, schedule, True)

    assert_gradients(found, expected_gradients(tensor_model(), seeds=(1, 1)))


def test_a_dtensor_between_stages_is_refused_with_the_fix():
    with RankPool(4) as pool:
        found = pool.run(train_tensor_parallel, "1f1b", False)

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
