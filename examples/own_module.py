"""A module of one's own, cut at its blocks and trained on two ranks.

torchrun --standalone --nproc-per-node 2 examples/own_module.py
"""

import torch
from torch import nn

import penstock as ps


class Model(nn.Module):
    """A plain module: its forward hands a mask to every block, and knows nothing of pipelines."""

    def __init__(self, words=50, width=32, depth=6):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, batch_first=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens, padding):  # [batch, seq], [batch, seq]
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return self.head(self.norm(hidden))


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


torch.manual_seed(0)
model = Model()
tokens = torch.randint(50, (16, 10), generator=torch.Generator().manual_seed(1))
padding = torch.zeros(16, 10, dtype=torch.bool)
padding[:, 8:] = True

layers = ps.cut(model, ["blocks.*"])
pipeline = ps.Pipeline(layers, "1f1b", 4, token_loss)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.003)
for step in range(1, 21):
    result = pipeline.step(tokens=tokens, padding=padding, target=tokens)
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.3f}")
pipeline.close()
