"""What one step works on: its microbatches and their weights, and what comes out of the last stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.supply import Supply
from penstock.execute.losses.loss import Loss, LossShares, Scale, apply_scale
from penstock.execute.losses.output import LossName

Place = tuple[int, int]
"""Microbatch and slice."""


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way through the pipeline."""

    slices: Sequence[Sequence[Microbatch]]
    """Per microbatch its slices; one, the microbatch itself, where it is not cut. Without data where a supply has not
    pulled them yet, or has let them go."""
    shares: LossShares
    """On the ranks of last stages; empty elsewhere."""
    loss: Loss | None
    keeps_outputs: bool
    losses: dict[Place, Tensor] = field(default_factory=dict)
    """The detached losses; filled on the rank of the last stage."""
    outputs: dict[Place, Any] = field(default_factory=dict)
    """The detached outputs, if asked for; filled on the rank of the last stage."""
    auxiliary_shares: LossShares = field(default_factory=lambda: LossShares([], []))
    """On every rank, those of losses that layers add."""
    tells_weight: bool = False
    """Whether the loss function is told the factor of its loss."""
    scale: Scale | None = None
    """Applied where backwards begin."""
    named: dict[LossName, dict[Place, Tensor]] = field(default_factory=dict)
    """0-dim, detached, in float64: the losses that have a name, of the layers and losses of this rank."""
    reported: dict[Place, Any] = field(default_factory=dict)
    """What the loss function had to say besides; filled on the ranks of last stages."""
    roots: dict[tuple[int, Place], Tensor] = field(default_factory=dict)
    """Per stage, where the backward of its auxiliary losses begins, between the forward and what is saved of it."""
    supply: Supply | None = None
    """Pulls data before their use and lets go of them after it; None where a batch is there as a whole."""

    @property
    def num_slices(self) -> int:
        """Slices per microbatch."""
        return len(self.slices[0])

    def note(self, name: LossName, place: Place, loss: Tensor) -> None:
        """Remember a loss by its name; of several stages of this rank, the sum."""
        noted, exact = self.named.setdefault(name, {}), loss.detach().to(torch.float64)
        noted[place] = noted[place] + exact if place in noted else exact

    def root_of(self, loss: Tensor, factor: float) -> Tensor | None:
        """Return where the backward of a loss begins: weighted and scaled; None where it weighs nothing.

        A weight of 0 means no tokens: such a loss may be NaN, and 0 x NaN would reach every weight.
        """
        if not factor:
            return None
        weighted = loss * factor
        return weighted if self.scale is None else apply_scale(self.scale, weighted)
