"""Losses that layers of any stage add by themselves: their gradient begins in the backward of that stage.

A stage's auxiliary losses are one more output of its graph, beside those that the next stage gets; nobody sends their
gradient, it is there from the start. So every schedule and both ways of running a backward treat them rightly.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.stages.feature import ForwardPart, Roots


class Auxiliary(Protocol):
    """A module of a layer to which the layer adds losses, such as `ps.AuxiliaryLoss`."""

    name: str
    weight: float

    def begin(self) -> None:
        """Forget everything, and count what is added until `take`."""

    def take(self) -> Tensor | None:
        """Return what was added, 0-dim, and forget it; what is added later, by recomputations, does not count."""

    def end(self) -> None:
        """Forget everything, and be as if nobody had called `begin`."""


Added = tuple[Mapping[LossName, Tensor], Tensor | None]
"""The losses that layers of a stage added in one forward: the values by name, and the sum of weight x value, if any.

Values are 0-dim, detached, before their weights, and added up in float64, so that the split into stages matters little.
The sum has its graph.
"""
_NONE: Added = ({}, None)


def take_all(modules: Sequence[Auxiliary]) -> Added:
    """Take what was added since the modules' `begin`."""
    values: dict[LossName, Tensor] = {}
    total: Tensor | None = None
    for module in modules:
        if (value := module.take()) is None:
            continue
        name = LossName(module.name, is_auxiliary=True, dtype=value.dtype)
        exact = value.detach().to(torch.float64)
        values[name] = values[name] + exact if name in values else exact
        weighted = value * module.weight
        total = weighted if total is None else total + weighted
    return values, total


class AddedLossPart(ForwardPart):
    """Notes what the layers add in one forward, and where its backward begins."""

    begins_backwards = True

    def __init__(self, modules: Sequence[Auxiliary], losses: StepLosses, place: MicrobatchKey) -> None:
        self._modules = modules
        self._losses = losses
        self._place = place
        self._added = _NONE
        self._roots: Roots = ([], [])

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        for module in self._modules:
            module.begin()
        try:
            yield
        finally:
            self._added = take_all(self._modules)

    def leave(self, outputs: Any) -> Any:
        (values, total), self._added = self._added, _NONE
        if total is None:
            return outputs
        losses = self._losses
        for name, value in values.items():
            losses.note(name, self._place, value)
        losses.note(LossName(ALL_TOGETHER, is_auxiliary=True, dtype=total.dtype), self._place, total.detach())
        if total.requires_grad:
            root = losses.root_of(total, losses.auxiliary_shares.factor(*self._place))
            if root is not None:
                self._roots = [get_gradient_edge(root)], [torch.ones_like(root)]
        return outputs

    def roots(self) -> Roots:
        return self._roots

    def again(self) -> ForwardPart:
        return AddedLossPart(self._modules, self._losses.forgetting(), self._place)
