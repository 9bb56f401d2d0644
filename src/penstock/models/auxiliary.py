"""`AuxiliaryLoss`: what a layer wants trained beside the loss, such as the balance of experts."""

import math
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError


class AuxiliaryLoss(nn.Module):
    """A submodule without parameters, to which a layer anywhere in the model adds a loss of its own.

        def __init__(self, width, num_experts):
            super().__init__()
            self.router = nn.Linear(width, num_experts)
            self.z_loss = AuxiliaryLoss("z_loss", weight=1e-3)

        def forward(self, features):  # [batch, seq, width]
            scores = self.router(features)
            self.z_loss.add(scores.logsumexp(-1).square().mean())

    `weight` x the value is trained; the value is reported under `name`. `weight` may be changed between steps, and 0
    only reports. Losses of one name are added up, whichever layers they come from.

    The model stays one for a single device: after a forward, `take` returns what was added, for the caller to train.
    Code that runs forwards again in the backward (activation checkpointing) calls `begin` before each forward: then
    only what comes between `begin` and `take` counts. `end` goes back to counting everything.

    Raises:
        ConfigError: no name, or a weight that is not finite.
    """

    def __init__(self, name: str, weight: float = 1.0) -> None:
        super().__init__()
        if not name:
            raise ConfigError("an auxiliary loss has no name; give the one to report it under", key="name")
        if not math.isfinite(weight):
            raise ConfigError(f"auxiliary loss {name!r} weighs {weight}; expected a finite number", key="weight")
        self.name = name
        self.weight = weight
        self._shared_collection = _Collection()
        # By thread: threads that run parts of a model side by side, each as one rank, may hold one and the same object,
        # and a recomputation may run in a thread of its own.
        self._collections_by_thread: dict[int, _Collection] = {}

    def add(self, value: Tensor) -> None:
        """Add a loss: a floating-point tensor without dimensions or of shape [1], a mean or sum as the model's loss is.

        Raises:
            PenstockError: it is something else, or its gradient could not come back.
        """
        collection = self._collection()
        if collection is None or not collection.is_open:
            return
        if not (isinstance(value, Tensor) and tuple(value.shape) in ((), (1,)) and value.is_floating_point()):
            raise PenstockError(
                f"auxiliary loss {self.name!r} was given {_describe(value)}; expected a floating-point tensor without "
                "dimensions, or of shape [1]. Reduce it with .mean() or .sum()"
            )
        if collection.records_gradients and not torch.is_grad_enabled():
            raise PenstockError(
                f"auxiliary loss {self.name!r} was added to where gradients are off, so it would train nothing; add "
                "outside of no_grad(), and checkpoint with use_reentrant=False"
            )
        collection.values.append(value.reshape(()))

    def begin(self) -> None:
        """Forget everything, and count what this thread adds from now on, until `take`."""
        self._shared_collection.values.clear()
        self._collections_by_thread[threading.get_ident()] = _Collection(records_gradients=torch.is_grad_enabled())

    def take(self) -> Tensor | None:
        """Return the sum of what was added, with its graph, and forget it; None where nothing was."""
        collection = self._collection()
        if collection is None:
            return None
        added, collection.values = collection.values, []
        collection.is_open = collection is self._shared_collection
        return sum(added[1:], start=added[0]) if added else None

    def end(self) -> None:
        """Forget everything, and from now on count whatever is added."""
        self._shared_collection.values.clear()
        self._collections_by_thread.pop(threading.get_ident(), None)

    def _collection(self) -> "_Collection | None":
        """The sum that this thread adds to; None where it is called while other threads collect."""
        return self._collections_by_thread.get(
            threading.get_ident(), None if self._collections_by_thread else self._shared_collection
        )


@dataclass(slots=True, eq=False)
class _Collection:
    """The sum of one thread."""

    values: list[Tensor] = field(default_factory=list)
    is_open: bool = True
    records_gradients: bool = False


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
