"""Train a T5 of Hugging Face on two ranks, and save it for transformers.

python examples/t5/make_tiny.py tiny-t5
torchrun --standalone --nproc-per-node 2 examples/t5/train.py tiny-t5 trained
"""

import sys

import torch

import penstock as ps

folder, target = sys.argv[1:]
model = ps.from_transformers(folder)  # the blocks of the encoder, then those of the decoder
pipeline = ps.Pipeline(model, "1f1b", 4)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)

generator = torch.Generator().manual_seed(0)
questions = torch.randint(3, 500, (8, 24), generator=generator)
answers = torch.randint(3, 500, (8, 12), generator=generator)
mask = torch.ones_like(questions)
mask[::2, 20:] = 0  # padding
start = torch.full((8, 1), model.config.decoder_start_token_id)
decoder_input_ids = torch.cat([start, answers[:, :-1]], 1)  # the answers, shifted to the right
for step in range(1, 21):
    result = pipeline.step(
        input_ids=questions, attention_mask=mask, decoder_input_ids=decoder_input_ids, target=answers
    )
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.3f}")
model.save_pretrained(pipeline, target)
pipeline.close()
