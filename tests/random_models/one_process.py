"""What one process computes, in plain torch: the judge of the random models. It shares no code with Penstock."""

from dataclasses import dataclass

import torch


@dataclass
class PlainModel:
    """Layers one after another, and the keywords that each of them takes."""

    layers: list
    takes: list

    def __call__(self, given, keywords):
        for layer, names in zip(self.layers, self.takes, strict=True):
            given = layer(given, **{name: keywords[name] for name in names if name in keywords})
        return given


def accumulate(model, batches, objective):
    """Run forward and backward of one microbatch after another; return the loss of the batch, and of each.

    `batches`: per microbatch its input, keywords and target. `objective` has the loss, what weighs it, and a scale.
    """
    weights = objective.weights([target for _, _, target in batches])
    losses = []
    for (given, keywords, target), weight in zip(batches, weights, strict=True):
        loss = objective.loss(model(given, keywords), target)
        if weight and loss.requires_grad:
            (loss * weight * objective.scale).backward()
        losses.append(loss.detach())
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack(counted).sum(), losses


@torch.no_grad()
def outputs(model, batches):
    """Return the outputs of all microbatches in evaluation mode, one below the other."""
    modes = [(module, module.training) for layer in model.layers for module in layer.modules()]
    for layer in model.layers:
        layer.eval()
    found = torch.cat([model(given, keywords) for given, keywords, _ in batches])
    for module, mode in modes:
        module.training = mode
    return found
