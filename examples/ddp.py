"""Two pipelines of two ranks, each with half of the batch; DistributedDataParallel averages the gradients.

torchrun --standalone --nproc-per-node 4 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

if not dist.is_initialized():
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
replica, replicas = mesh.get_local_rank("replica"), mesh.get_group("replica")

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
layers = [DistributedDataParallel(layer, process_group=replicas) for layer in layers]
group = mesh.get_group("pipeline")
pipeline = ps.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, process_group=group)

inputs, target = torch.randn(32, 16), torch.rand(32, 16)
rows = slice(16 * replica, 16 * (replica + 1))
result = pipeline.step(inputs[rows], target=target[rows])

if dist.get_rank() == 0:
    print(f"loss {result.loss:.4f}")
pipeline.close()
dist.destroy_process_group()
