"""What a run of one batch gave: tensors by kind and name, of the unsplit model or of one rank of the parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.execute.values.tree import flatten

START, EVALUATION, TRAINING = "start", "evaluation", "training"
OUTPUT, LOSS, GRADIENT, BUFFER, PARAMETER = "output", "loss", "gradient", "buffer", "parameter"
TensorsByName = Mapping[str, Tensor | None]
SHRINKING = 0.99
"""Factor of every parameter between two batches, as an optimizer would change them: a stale copy is noticed."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The tensors after one batch in one mode."""

    mode: str
    batch: int
    tensors: Mapping[str, TensorsByName]
    """Tensors by kind, then by name; None for a parameter without a gradient."""


def kept(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return copies, which later runs do not change."""
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def named_outputs(output: Any) -> dict[str, Tensor | None]:
    """Return the tensors of an output, by their places in it."""
    leaves, tree = flatten(output)
    pairs = zip(tree.places("output"), leaves, strict=True)
    return kept({place: leaf for place, leaf in pairs if isinstance(leaf, Tensor)})


def named_losses(loss: Tensor | None, losses: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return the loss of the batch, and those of its microbatches."""
    by_microbatch = {f"microbatch {index}": value for index, value in enumerate(losses)}
    return kept({**by_microbatch, **({} if loss is None else {"batch": loss})})


@torch.no_grad()
def shrink(parameters: Sequence[Tensor]) -> None:
    """Change parameters a little, those of both sides alike."""
    for parameter in parameters:
        parameter.mul_(SHRINKING)
