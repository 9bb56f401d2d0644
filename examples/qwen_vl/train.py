"""Train a Qwen2.5-VL of Hugging Face on two ranks, with its vision blocks as layers, and save it for transformers.

python examples/qwen_vl/make_tiny.py tiny-qwen-vl
torchrun --standalone --nproc-per-node 2 examples/qwen_vl/train.py tiny-qwen-vl trained
"""

import sys

import torch

import penstock as ps

IMAGE, BEGIN, END = 500, 502, 503
MICROBATCHES = 4


def batch_of(grids, generator):
    """Return rows of text with one image each, as the processor of the model makes them; `grids` count patches."""
    lengths = [height * width // 4 for height, width in grids]  # four patches become one token
    rows = []
    for length in lengths:
        image = torch.tensor([BEGIN, *[IMAGE] * length, END])
        text = torch.randint(3, 500, (32 - len(image),), generator=generator)
        rows.append(torch.cat([image, text]))
    tokens = torch.stack(rows)
    patches = [torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator) for height, width in grids]
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([[1, height, width] for height, width in grids]),
        "mm_token_type_ids": (tokens == IMAGE).long(),
    }
    return batch, patches


folder, target = sys.argv[1:]
grids = [(4, 4), (4, 8), (8, 4), (4, 4), (8, 8), (4, 4), (4, 8), (4, 4)]
batch, patches = batch_of(grids, torch.Generator().manual_seed(0))
labels = batch["input_ids"].masked_fill(batch["input_ids"] >= IMAGE, -100)

# The example is a batch with which one run without values finds in which order the forward calls its blocks.
model = ps.from_transformers(folder, example=batch)
# Rows have images of different sizes, so the patches of each microbatch are split by hand.
rows = len(grids) // MICROBATCHES
split = [torch.cat(patches[begin : begin + rows]) for begin in range(0, len(grids), rows)]
specs = ps.BatchSpec(kwargs={"pixel_values": ps.Replicate()})
pipeline = ps.Pipeline(model, "1f1b", MICROBATCHES, specs=specs)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

for step in range(1, 21):
    result = pipeline.step(**{**batch, "pixel_values": ps.PreSplit(split)}, target=labels)
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.3f}")
model.save_pretrained(pipeline, target)
pipeline.close()
