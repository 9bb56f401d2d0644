"""Pipelines of any layout whose model and optimizer hold known values, which one saves and another one loads.

Layouts are P x D: ranks of a pipeline x replicas, which are threads. Values come from names, so that no step has to be
run.
"""

import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.checkpoints.optimizer_state import MAIN_WEIGHT
from penstock.execute.replicas.rows import Rows
from penstock.pipeline import Pipeline
from penstock.train.optimizing.main_weights import MainWeightOptimizer
from tests.support.mesh_pipelines import on_mesh


class Uneven(nn.Module):
    """Parameters that replicas cannot share out evenly, and buffers of two types."""

    def __init__(self, dtype=torch.float32, num_rows=5):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(num_rows, 3, dtype=dtype))
        self.row = nn.Parameter(torch.zeros(1, 4, dtype=dtype))
        self.none = nn.Parameter(torch.zeros(0, 2, dtype=dtype))
        self.scale = nn.Parameter(torch.zeros((), dtype=dtype))
        self.frozen = nn.Parameter(torch.zeros(7, 2, dtype=dtype), requires_grad=False)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def uneven_layers(dtype=torch.float32, num_rows=5):
    return [Uneven(dtype, num_rows) for _ in range(4)]


@dataclass
class Layout:
    """How many ranks hold what."""

    pipeline: int = 1
    data: int = 1
    is_sharded: bool = False
    schedule: str = "gpipe"

    def __str__(self):
        return f"{self.pipeline}x{self.data}{' shards' if self.is_sharded else ''}"

    def make(self, places, layers):
        options = {"shard": "full"} if self.is_sharded else {}
        return Pipeline(layers, self.schedule, 4, nn.functional.mse_loss, mesh=places, **options)


def run(layout, case, *args, make_layers=uneven_layers):
    """Return what `case(pipeline, *args)` returned on every rank."""

    def on_rank(places):
        pipeline = layout.make(places, make_layers())
        try:
            return case(pipeline, *args)
        finally:
            pipeline.close()

    return on_mesh(layout.pipeline, layout.data, on_rank)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def main_adamw(parameters):
    parameters = list(parameters)
    for parameter in parameters:
        parameter.main_grad = None
    return MainWeightOptimizer(parameters, torch.optim.AdamW, lr=1e-2, foreach=True)


def stepped(optimizer):
    """The optimizer, with all that it keeps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = torch.zeros_like(parameter)
            if isinstance(optimizer, MainWeightOptimizer):
                parameter.main_grad = gradient.float()
            else:
                parameter.grad = gradient
    optimizer.step()
    return optimizer


def known(name, shape, dtype):
    """Values that are those of a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator, dtype=torch.float32) * 64).to(dtype)


def fill(pipeline, optimizer=None):
    """Give the model and the optimizer the values of their names."""
    with torch.no_grad():
        for _, local, expected in _pairs(pipeline, optimizer):
            local.copy_(expected)


def forget(pipeline):
    """Give the model other values than those."""
    with torch.no_grad():
        for _, local, _ in _pairs(pipeline, None):
            local.fill_(1)


def wrong(pipeline, optimizer=None):
    """Name what does not have the bits of its name."""
    return [
        name
        for name, local, expected in _pairs(pipeline, optimizer)
        if local.dtype != expected.dtype or not torch.equal(local, expected)
    ]


def num_tensors(pipeline, optimizer=None):
    return len(_pairs(pipeline, optimizer))


def _pairs(pipeline, optimizer):
    """List what this rank holds, each with its name and with what it is to have."""
    state = dict(pipeline.state_dict())
    if optimizer is not None:
        for name, parameter in pipeline.named_parameters():
            state |= {f"{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    found = []
    for name, value in state.items():
        owner, _, key = name.partition(":")
        # A parameter is its main weight, rounded.
        name = f"{pipeline.owner_names.get(owner, owner)}:{'' if key == MAIN_WEIGHT else key}"
        expected = known(name, value.shape, value.dtype)
        local = value.detach()
        if isinstance(value, DTensor):
            local = local.to_local()
            if value.dim():
                rows = Rows(value.shape, (), pipeline.num_replicas).of_replica(pipeline.replica)
                expected = expected[rows.start : rows.stop]
        found.append((name, local, expected))
    return found


def kinds(pipeline, optimizer):
    """What each parameter and each of the optimizer's tensors is."""
    return {
        f"{name}:{key}": (type(value).__name__, value.dtype, getattr(value, "placements", None))
        for name, parameter in pipeline.named_parameters()
        for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items()
    }


def places_of(replica, num_replicas):
    """As much of the places of a rank as tensors need."""
    return SimpleNamespace(replica=replica, num_replicas=num_replicas)
