"""Train by GRPO on two ranks, against a process that generates with the weights that it is sent.

python examples/llama/make_tiny.py tiny-llama
torchrun --standalone --nproc-per-node 2 examples/grpo/train.py tiny-llama engine.sock
"""

import sys
from multiprocessing.connection import Client
from subprocess import PIPE, Popen

import torch
import torch.distributed as dist

import penstock as ps

folder, address = sys.argv[1:]
GROUP, CLIP, PROMPTS = 8, 0.2, [[5, 6, 7, 8], [9, 10, 11, 12]]


def grpo(log_probs, target):
    ratio, advantage = (log_probs - target["old"]).exp(), target["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    counted = target["labels"][:, 1:] != -100  # tokens of the answers alone
    return ps.LossOutput(-(gain * counted).sum(), counted.sum(), reported=log_probs)


def ask(*message):
    engine.send(message)
    if not engine.poll(90):
        sys.exit(f"the engine has not answered {message[0]!r} for 90 s")
    is_right, answer = engine.recv()
    return answer if is_right else sys.exit(f"the engine refuses {answer}")


model = ps.from_transformers(folder)
pipeline = ps.Pipeline(model, "1f1b", 4, model.log_probs(grpo), count=lambda target: model.count(target["labels"]))
optimizer, source = torch.optim.AdamW(pipeline.parameters(), lr=3e-3), model.weight_source(pipeline)
if pipeline.rank == 0:
    command = [sys.executable, __file__.replace("train.py", "receiver.py"), folder, address]
    Popen(command, stdout=PIPE).stdout.readline()  # it is ready
dist.barrier()
engine = Client(address, authkey=b"grpo")
for step in range(1, 9):
    dist.broadcast_object_list(rows := [ask("generate", PROMPTS, GROUP, 12) if pipeline.rank == 0 else None])
    tokens = torch.tensor(rows[0])
    labels = tokens.index_fill(1, torch.arange(4), -100)
    reward = (tokens[:, 4:] < 256).float().mean(1)  # stands for a judge
    advantage = torch.layer_norm(reward.view(-1, GROUP), (GROUP,)).flatten()  # within its group
    target = {"labels": labels, "advantage": advantage, "old": torch.zeros(len(tokens), tokens.shape[1] - 1)}
    old = pipeline.evaluate(tokens, target=target).reported  # on the rank of the last stage, which takes targets
    for _ in range(2):
        pipeline.step(tokens, target=target | {"old": torch.cat(old)} if old else None)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in source:
        ask("take", name, tensor.numpy())
    if pipeline.rank == 0:
        version = ask("finish", [item.name for item in source.metadata()])
        print(f"step {step}  reward {reward.mean():.3f}  weights {version}")
pipeline.close()
