"""What one process computes, slices included: the judge of the product."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.losses.loss import LossWeights, combine_losses
from penstock.execute.stages.keywords import run_layers
from penstock.execute.stages.randomness import SeededRandomness
from tests.reference import reference_step


@dataclass
class Losses:
    """What one process found of a step beside the gradients."""

    loss: Tensor
    losses: list


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
    rule = BatchRule(num_microbatches, num_slices, options.get("allow_ragged", False))
    return _sliced(layers, batch, loss, rule=rule, step_number=step_number, options=options)


def _sliced(layers, batch, loss, *, rule, step_number, options):
    """Draw for each slice apart, as only a pipeline that cuts sequences does; layers treat positions alone."""
    microbatches = rule.microbatches((batch[0],), {}, batch[1])
    slices = [rule.slices(microbatch) for microbatch in microbatches]
    weights = LossWeights(options.get("reduction", "mean"), options.get("count"))
    shares = weights.shares(microbatches, slices)
    randomness = SeededRandomness(options["seed"], torch.device("cpu"))
    losses = []
    for microbatch, parts in enumerate(slices):
        found = []
        for index, part in enumerate(parts):
            with randomness.drawing(step_number, (microbatch, index)) as before_layer:
                found.append(loss(run_layers(layers, part.args, {}, before_layer), part.target))
            if shares.factor(microbatch, index):
                (found[-1] * shares.factor(microbatch, index)).backward()
        losses.append(combine_losses(found, shares.fractions[microbatch]))
    return Losses(combine_losses(losses, shares.weights), losses)
