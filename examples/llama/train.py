"""Train a Llama of Hugging Face on two ranks, and save it for transformers.

python examples/llama/make_tiny.py tiny-llama
torchrun --standalone --nproc-per-node 2 examples/llama/train.py tiny-llama trained
"""

import sys

import torch

import penstock as ps

folder, target = sys.argv[1:]
model = ps.from_transformers(folder)
pipeline = ps.Pipeline(model, "1f1b", 4)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)

tokens = torch.randint(3, 500, (8, 32), generator=torch.Generator().manual_seed(0))
for step in range(1, 21):
    result = pipeline.step(tokens, target=tokens)  # labels are shifted by the loss, as in transformers
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.3f}")
model.save_pretrained(pipeline, target)
pipeline.close()
