"""The batches of a comparison in one form, and the loss where the caller has none."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, described
from penstock.execute.batch.stream import Part
from penstock.execute.values.tree import flatten

KEY, TARGET, LABELS = "batches", "target", "labels"
EXPECTED = (
    "a tensor, a tuple of positional arguments, a dict of keywords with its 'target' if there is one, or "
    "ps.Part(*args, target=..., **kwargs)"
)
NO_TARGET = 0.0
"""Target of a batch that is compared without one; a number reaches every microbatch as it is."""


def read_batches(batches: Sequence[Any], device: torch.device, *, labels: bool) -> list[Part]:
    """Return batches as parts; `labels` says that a dict's labels are its target, as for models of transformers.

    Raises:
        ConfigError: there is none, one is of another form, or one has tensors on another device than the model.
    """
    if not batches:
        raise ConfigError(f"there is none; pass one or more, each {EXPECTED}", key=KEY)
    parts = [_as_part(batch, number, (TARGET, LABELS) if labels else (TARGET,)) for number, batch in enumerate(batches)]
    for number, part in enumerate(parts):
        leaves = flatten((part.args, part.kwargs, part.target))[0]
        away = [leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device != device]
        if away:
            raise ConfigError(
                f"batch {number} has a tensor on {away[0]}, but the model is on {device}; move it there", key=KEY
            )
    return parts


def _as_part(batch: Any, number: int, target_names: Sequence[str]) -> Part:
    if isinstance(batch, Part):
        return batch
    if isinstance(batch, Tensor):
        return Part(batch)
    if isinstance(batch, Mapping):
        keywords = dict(batch)
        targets = [keywords.pop(name) for name in target_names if name in keywords]
        return Part(target=targets[0] if targets else None, **keywords)
    if isinstance(batch, tuple | list):
        return Part(*batch)
    raise ConfigError(f"batch {number} is {described(batch)}; expected {EXPECTED}", key=KEY)


def default_loss(output: Any, target: Any) -> Tensor:
    """Return a loss that every element of every output has its own part in, so that no gradient cancels.

    A plain sum of squares would not do: behind a LayerNorm it is constant. Each element x adds (x + w)^2 to a mean,
    with a fixed w of its own.
    """
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise ConfigError("the output has no floating-point tensor, so nothing can be trained on it", key="model")
    means = []
    for leaf in leaves:
        weights = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float64).cos().to(leaf.dtype)
        means.append((leaf + weights.view(leaf.shape)).square().mean())
    first, *others = means
    return sum((mean.to(first.dtype) for mean in others), start=first)
