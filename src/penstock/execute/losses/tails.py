"""`TailedOutput`: what a last stage hands to a loss that applies the end of the model itself, some positions at a time.

    plain    last stage:  blocks ──► hidden ──► tail ──► logits ──► loss(logits, target)
    chunked  last stage:  blocks ──► hidden ──────────────────────► loss(TailedOutput(hidden, tail), target)

With a large vocabulary the logits of a microbatch are many times as large as its hidden state, and so is what the
backward needs of them. A last layer is a tail if it treats each position alone: it is a plain `nn.Linear`, or has an
attribute `tail`, a function of a hidden state [1, positions, width]. A loss asks for it by its attribute `takes_tail`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Tail = Callable[[Tensor], Any]
"""Makes the outputs of hidden states [1, positions, width]."""


@dataclass(frozen=True, slots=True, eq=False)
class TailedOutput:
    """The output of a last stage without its last layer."""

    hidden: Tensor
    """[rows, length, width], or of any other shape whose last dimension is the width."""
    tail: Tail

    def outputs(self) -> Tensor:
        """Return the outputs of all positions, as the last layer would return them."""
        outputs: Tensor = self.tail(as_positions(self.hidden))
        return outputs.view(*self.hidden.shape[:-1], *outputs.shape[2:])


def as_positions(hidden: Tensor) -> Tensor:
    """Return hidden states as one row of positions: [1, positions, width]."""
    return hidden.reshape(1, -1, hidden.shape[-1])


def tail_of(layer: nn.Module) -> Tail | None:
    """Return a last layer as a function of some positions; None where it may need the others."""
    if type(layer) is nn.Linear:
        return layer
    tail: Tail | None = getattr(layer, "tail", None)
    return tail


def unwrapped(loss: Any) -> Any:
    """Return the function behind arguments that functools.partial gives it."""
    while isinstance(loss, partial):
        loss = loss.func
    return loss


def takes_tail(loss: Any) -> bool:
    """Whether a loss function applies the end of the model itself."""
    return bool(getattr(unwrapped(loss), "takes_tail", False))


def reported_outputs(outputs: Any) -> Any:
    """Return the outputs of a last stage as callers know them."""
    if not isinstance(outputs, TailedOutput):
        return outputs
    with torch.no_grad():
        return outputs.outputs()
