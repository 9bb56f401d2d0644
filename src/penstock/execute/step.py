"""What one step works on: its microbatches and their weights, and what comes out of the last stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.execute.loss import Loss
from penstock.execute.microbatch import Microbatch


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way through the pipeline."""

    microbatches: Sequence[Microbatch]
    weights: Sequence[float]
    """Per microbatch, its share in the loss of the batch."""
    loss: Loss | None
    keeps_outputs: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Per microbatch, the detached loss; filled on the rank of the last stage."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Per microbatch, the detached output, if asked for; filled on the rank of the last stage."""
