"""Train LoRA on a Llama of Hugging Face on two ranks, and save it for peft.

python examples/llama/make_tiny.py tiny-llama
torchrun --standalone --nproc-per-node 2 examples/lora/train.py tiny-llama adapter
"""

import sys

import torch
from peft import LoraConfig

import penstock as ps

folder, target = sys.argv[1:]
config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = ps.from_transformers(folder, adapter=config)
pipeline = ps.Pipeline(model, "1f1b", 4)
trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-2)  # a rank that trains nothing has none

tokens = torch.randint(3, 500, (8, 32), generator=torch.Generator().manual_seed(0))
for step in range(1, 21):
    result = pipeline.step(tokens, target=tokens)
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.3f}")
model.save_pretrained(pipeline, target)  # the adapter alone, as peft saves it
model.save_pretrained(pipeline, f"{target}-merged", merged=True)
pipeline.close()
