"""A small training on ranks that are threads, which saves and loads, for tests of checkpoints."""

import torch

from penstock.checkpoints.loading import load_checkpoint
from penstock.checkpoints.writer import save_checkpoint
from tests.support.local_pipelines import on_ranks
from tests.train.local_ranks import random_batch, small_layers, small_pipeline


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(transport, begin, end, *, save=None, load=None, tied_head=False, **options):
    """Train from step `begin` to `end`, counted from 0; return losses, weights by name, and what was loaded."""
    pipeline = small_pipeline(transport, small_layers(tied_head=tied_head), **options)
    stepper = adamw(pipeline.parameters())
    extra = None if load is None else load_checkpoint(load, pipeline, stepper)
    losses = []
    for step in range(begin, end):
        inputs, target = random_batch(step)
        losses.append(pipeline.step(inputs, target=target).loss.item())
        pipeline.clip_grad_norm_(1.0)
        stepper.step()
        stepper.zero_grad()
    if save is not None:
        save_checkpoint(save, pipeline, stepper, step=end, extra={"at": end})
    weights = {name: value.detach().clone() for name, value in pipeline.state_dict().items()}
    pipeline.close()
    return losses, weights, extra


def train_on(num_ranks, *args, **options):
    """Train on several ranks; return the losses and the weights of all of them together, and what rank 0 loaded."""
    results = on_ranks(num_ranks, lambda transport: train(transport, *args, **options))
    assert all(losses == results[0][0] for losses, _, _ in results)
    return results[0][0], {name: value for _, weights, _ in results for name, value in weights.items()}, results[0][2]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
