"""Stages of layers that went through `torch.compile` train as the plain layers do on one process, bit for bit."""

import pytest
import torch

from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, Outcome, Task, block, difference, gradients_of, square_loss, values
from tests.ranks import RankPool

NUM_MICROBATCHES, NUM_LAYERS, NUM_STEPS = 4, 4, 2
BACKENDS = ("eager", "aot_eager")
"""Those of torch that need no compiler of C++; both trace the forward, the second one the backward as well."""


def plain_layers():
    return [block(seed) for seed in range(NUM_LAYERS)]


def whole(seed):
    rows = 2 * NUM_MICROBATCHES
    return (values(seed, rows, WIDTH),), values(seed + 1, rows, WIDTH)


def train_compiled(rank, backend, schedule):
    """Run steps without zeroing; on the first the layers are compiled."""
    layers = [torch.compile(layer, backend=backend, fullgraph=True) for layer in plain_layers()]
    pipeline = Pipeline(layers, schedule, NUM_MICROBATCHES, square_loss)
    for _ in range(NUM_STEPS):
        inputs, target = whole(1)
        result = pipeline.step(*inputs, target=target)
    gradients = gradients_of(pipeline.named_parameters())
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pipeline.close()
    return Outcome(result, {name.replace("_orig_mod.", ""): each for name, each in gradients.items()}), num_graphs


@pytest.mark.slow
def test_compiled_stages_train_as_plain_layers_on_one_process():
    task = Task(plain_layers, *whole(1))
    result, gradients = task.reference(NUM_MICROBATCHES)
    twice = {name: 2 * gradient for name, gradient in gradients.items()}

    with RankPool(2) as pool:
        for backend in BACKENDS:
            for schedule in ("1f1b", "zb-h1"):
                found = pool.run(train_compiled, backend, schedule)
                assert all(num_graphs > 0 for _, num_graphs in found), "nothing was compiled"
                assert difference([outcome for outcome, _ in found], (result, twice), tolerance=1e-6) == []
