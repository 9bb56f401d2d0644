"""Stages that ranks bring by themselves, and the reference that holds all of them."""

import torch
from torch import nn

from tests.support.local_pipelines import block, square_loss, values
from tests.support.reference import reference_step

WIDTH = 6


def own_stage(stage, dtype=torch.float64):
    """Build one stage of the model, and nothing else of it."""
    return block(10 + stage, dtype)


def batch(rows, dtype=torch.float64):
    return values(1, rows, WIDTH, dtype=dtype), values(2, rows, WIDTH, dtype=dtype)


def whole_model(num_stages, dtype=torch.float64):
    return [own_stage(stage, dtype) for stage in range(num_stages)]


def reference(num_stages, num_microbatches, rows=8, *, dtype=torch.float64, steps=1, loss=square_loss, **options):
    """Train all stages in one process; return the last result and the gradients by stage and name."""
    layers = whole_model(num_stages, dtype)
    inputs, target = batch(rows, dtype)
    for _ in range(steps):
        result = reference_step(layers, (inputs,), {}, target, loss=loss, num_microbatches=num_microbatches, **options)
    return result, gradients(dict(enumerate(layers)))


def gradients(stages):
    """Gradients by (stage, name) of the modules of some stages."""
    return {
        (stage, name): None if parameter.grad is None else parameter.grad.clone()
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
    }


def assert_gradients(found_of_ranks, expected, *, tolerance=0.0):
    """Together the ranks have every gradient, equal to the expected; bit for bit without a tolerance."""
    found = {key: gradient for own in found_of_ranks for key, gradient in own.items()}
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=tolerance, atol=tolerance, msg=str(key))


class Wrapper(nn.Module):
    """What DistributedDataParallel and mixed-precision wrappers look like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
