"""What one step works on: its microbatches and their weights, and what comes out of the last stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.execute.loss import Loss, LossShares
from penstock.execute.microbatch import Microbatch

Place = tuple[int, int]
"""Microbatch and slice."""


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way through the pipeline."""

    slices: Sequence[Sequence[Microbatch]]
    """Per microbatch its slices; one, the microbatch itself, where it is not cut."""
    shares: LossShares
    """On the ranks of last stages; empty elsewhere."""
    loss: Loss | None
    keeps_outputs: bool
    losses: dict[Place, Tensor] = field(default_factory=dict)
    """The detached losses; filled on the rank of the last stage."""
    outputs: dict[Place, Any] = field(default_factory=dict)
    """The detached outputs, if asked for; filled on the rank of the last stage."""

    @property
    def num_slices(self) -> int:
        """Slices per microbatch."""
        return len(self.slices[0])
