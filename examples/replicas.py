"""Two replicas of a pipeline of two ranks, which share out the weights and are trained as one job.

torchrun --standalone --nproc-per-node 4 examples/replicas.py
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps


def build(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
layers = [partial(build, index) for index in range(4)]
with ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, mesh=mesh, shard="full") as pipeline:
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=True)
    torch.manual_seed(9)
    inputs, target = torch.randn(32, 16), torch.rand(32, 16)
    rows = slice(16 * pipeline.replica, 16 * (pipeline.replica + 1))
    result = pipeline.step(inputs[rows], target=target[rows])
    optimizer.step()
    if (pipeline.rank, pipeline.replica) == (0, 0):
        print(f"loss {result.loss:.4f}")  # of all 32 rows
torch.distributed.destroy_process_group()
