"""What one process computes, slices included: the judge of the product."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.reference import (
    AFTER_ALL_LAYERS,
    combined,
    even_sizes,
    generator_seed,
    reference_step,
    rows_of,
    weights,
)


@dataclass
class Losses:
    """What one process found of a step beside the gradients."""

    loss: Tensor
    losses: list
    named_losses: dict = field(default_factory=dict)

    @property
    def total(self):
        """The loss of the batch, since no layer adds one of its own."""
        return self.loss


def step_of_one_process(layers, batch, loss, *, num_microbatches, num_slices, step_number, options):
    """Run one step of the layers, adding to their gradients."""
    tokens, target = batch
    if num_slices == 1 or options.get("seed") is None:
        return reference_step(
            layers,
            (tokens,),
            {},
            target,
            loss=loss,
            num_microbatches=num_microbatches,
            step_number=step_number,
            **options,
        )
    reduction, count = options.get("reduction", "mean"), options.get("count")
    microbatches = list(zip(*(cut(tensor, 0, num_microbatches) for tensor in batch), strict=True))
    factors = shares(microbatches, 0, reduction, count)
    losses = []
    for microbatch, parts in enumerate(microbatches):
        slices = list(zip(*(cut(tensor, 1, num_slices) for tensor in parts), strict=True))
        fractions = shares(slices, 1, reduction, count)
        found = []
        for index, (inputs, wanted) in enumerate(slices):
            found.append(drawing(layers, inputs, wanted, loss, (options["seed"], step_number), (microbatch, index)))
            if factor := factors[microbatch] * fractions[index]:
                (found[-1] * factor).backward()
        losses.append(combined(found, fractions if any(fractions) else [1 / num_slices] * num_slices))
    return Losses(combined(losses, factors), losses)


def cut(tensor, dim, num_parts):
    sizes = even_sizes(tensor.shape[dim], num_parts)
    return [rows_of(tensor, dim, index, sizes) for index in range(num_parts)]


def shares(parts, dim, reduction, count):
    return weights([target.shape[dim] if count is None else count(target) for _, target in parts], reduction)


def drawing(layers, inputs, target, loss, step, place):
    """Return the loss of a slice, for which every layer draws apart; layers treat positions alone."""
    with torch.random.fork_rng(devices=[]):
        for number, layer in enumerate(layers):
            torch.manual_seed(generator_seed(*step, number, *place))
            inputs = layer(inputs)
        torch.manual_seed(generator_seed(*step, AFTER_ALL_LAYERS, *place))
        return loss(inputs, target)
