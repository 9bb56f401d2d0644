"""A training loop with autocast and a GradScaler, on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/mixed_precision.py
"""

import torch
from torch import nn

import penstock as ps

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**27, growth_interval=5)  # so large that some steps overflow
pipeline = ps.Pipeline(layers, "1f1b", 8, nn.functional.mse_loss, scale_loss=scaler.scale)
parameters = dict(pipeline.named_parameters())
optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)

inputs, target = torch.randn(32, 16), torch.rand(32, 16)
history = []
for _ in range(20):
    with torch.autocast("cpu", torch.float16):
        result = pipeline.step(inputs, target=target)
    scaler.unscale_(optimizer)
    pipeline.clip_grad_norm_(1.0)  # over all ranks
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    history.append((result.loss.item(), scaler.get_scale()))

if pipeline.rank == 0:
    print(f"loss {history[0][0]:.4f} -> {history[-1][0]:.4f}, scale {history[0][1]:g} -> {history[-1][1]:g}")
pipeline.close()
