"""A compiled decoder under a zero-bubble schedule, on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/compiled.py [inductor | aot_eager]

Without an argument Inductor is taken where its compiler is found. Each block is compiled once, in the first step.
"""

import sys

import torch

import penstock as ps
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers

torch.manual_seed(0)
decoder = DecoderConfig(vocabulary=64, width=64, layers=4, heads=4, key_value_heads=4, hidden=176, length=32)
backend = sys.argv[1] if len(sys.argv) > 1 else True
pipeline = ps.Pipeline(decoder_layers(decoder), "zbv", 4, cross_entropy_loss, compile=backend)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)

text = torch.arange(8 * 33).reshape(8, 33) * 7 % 64  # each token says which one follows
losses = []
for _ in range(20):
    losses.append(pipeline.step(text[:, :-1], target=text[:, 1:]).loss.item())
    optimizer.step()
    optimizer.zero_grad()

if pipeline.rank == 0:
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
pipeline.close()
