"""Two replicas of a pipeline of two ranks, as four processes, and the one process that runs the whole batch."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from penstock.pipeline import Pipeline
from tests.support.local_pipelines import settle, square_loss, values

NUM_REPLICAS = 2
NUM_LAYERS = 4
MICROBATCHES = 4
WIDTH = 8
ROWS = 16
"""Of the whole batch; each replica gets half of it."""
TOLERANCE = 1e-12
FLOAT = torch.float64


def layers():
    """Blocks whose first module is a product, so that their backwards can be split."""
    return [settle(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), nn.Tanh()), seed) for seed in range(NUM_LAYERS)]


def batch(seed=1):
    return values(seed, ROWS, WIDTH, dtype=FLOAT), values(seed + 100, ROWS, WIDTH, dtype=FLOAT)


def mesh():
    """This rank's place among the replicas and in its pipeline."""
    return init_device_mesh(
        "cpu", (NUM_REPLICAS, dist.get_world_size() // NUM_REPLICAS), mesh_dim_names=("replica", "pipeline")
    )


def pipeline_of(wrapped, schedule, own_mesh, *, loss=square_loss, **options):
    options = {"deadline_s": 20.0, "process_group": own_mesh.get_group("pipeline")} | options
    return Pipeline(wrapped, schedule, MICROBATCHES, loss, **options)


def own_rows(own_mesh, seed=1):
    """This replica's part of the whole batch, as arguments of `step`."""
    replica = own_mesh.get_local_rank("replica")
    inputs, target = (tensor.chunk(NUM_REPLICAS)[replica] for tensor in batch(seed))
    return inputs, target


def full(tensor):
    """A plain copy of a gradient, whatever parts of it this rank has."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients_of(pipeline, attribute="grad"):
    """By the names of the unwrapped layers."""
    found = {name: full(getattr(parameter, attribute)) for name, parameter in pipeline.named_parameters()}
    return {name.replace("module.", ""): gradient for name, gradient in found.items()}


def expected_gradients(model=None, seeds=(1,)):
    """What one process that runs the whole batches gets, the gradients of several added up."""
    model = nn.Sequential(*copy.deepcopy(model or layers()))
    for seed in seeds:
        inputs, target = batch(seed)
        square_loss(model(inputs), target).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients(found_on_ranks, expected):
    """Every rank has the gradients of one process, and together the ranks have all of them."""
    for found in found_on_ranks:
        assert [name for name in found if found[name] is None] == [name for name in found if expected[name] is None]
        there = {name: gradient for name, gradient in found.items() if gradient is not None}
        torch.testing.assert_close(there, {name: expected[name] for name in there}, rtol=0, atol=TOLERANCE)
    assert {name for found in found_on_ranks for name in found} == set(expected)
