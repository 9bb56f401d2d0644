"""Prints the most bytes that a step takes beside what it begins with, of a model with a large vocabulary.

python -m tests.support.tail_memory SCHEDULE LENGTH CHUNK
"""

import sys
from functools import partial

import torch
from torch import nn

import penstock as ps
from tests.support.memory import peak_bytes, reset_peak


def main(schedule, length, chunk):
    torch.set_num_threads(1)
    layers = [nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 8000)]
    loss = partial(ps.losses.chunked_cross_entropy, chunk=int(chunk) if chunk.isdecimal() else chunk)
    tokens = torch.randint(100, (2, int(length)))
    with ps.Pipeline(layers, schedule, 2, loss, ranks=1) as pipeline:
        for _ in range(2):
            pipeline.step(tokens, target=tokens)
        reset_peak()
        start = peak_bytes()
        pipeline.step(tokens, target=tokens)
        print(peak_bytes() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
