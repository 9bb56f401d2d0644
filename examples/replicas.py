"""Two replicas of a pipeline of two ranks, each with half of the batch, trained as one job.

torchrun --standalone --nproc-per-node 4 examples/replicas.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
pipeline = ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, mesh=mesh)

inputs, target = torch.randn(32, 16), torch.rand(32, 16)
rows = slice(16 * pipeline.replica, 16 * (pipeline.replica + 1))
result = pipeline.step(inputs[rows], target=target[rows])
if (pipeline.rank, pipeline.replica) == (0, 0):
    print(f"loss {result.loss:.4f}")  # of all 32 rows
pipeline.close()
torch.distributed.destroy_process_group()
