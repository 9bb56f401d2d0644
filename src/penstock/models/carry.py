"""`Carry`: what a layer keeps from one slice of a sequence to the next."""

from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError


class Carry(nn.Module):
    """A submodule without parameters, in which a layer that looks back leaves what the next slice will need.

        def __init__(self):
            super().__init__()
            self.carry = Carry()

        def forward(self, features):  # [batch, seq, width]
            before = self.carry.get()
            sums = features.cumsum(1) if before is None else before + features.cumsum(1)
            self.carry.put(sums[:, -1:])
            return sums

    The model stays one for a single device: where sequences are whole, `get` returns None and `put` does nothing.
    Code that cuts sequences calls `begin_slice` and `end_slice` around each forward, and takes the gradients back.
    """

    def __init__(self) -> None:
        super().__init__()
        # Values lie in tuples, because a module registers parameters and modules among its attributes as its own.
        self._earlier_value: tuple[Any, ...] = ()
        self._new_value: tuple[Any, ...] = ()
        self._keeps = False
        self._records_gradients = False

    def get(self) -> Any:
        """Return what was last put for the slices before this one; None at the start of a sequence."""
        return self._earlier_value[0] if self._earlier_value else None

    def put(self, value: Any) -> None:
        """Leave a value for the slices after this one: a tensor or a tree of tensors and plain values.

        Raises:
            PenstockError: a second value in one slice, or one whose gradient could not come back.
        """
        if not self._keeps:
            return
        if self._new_value:
            raise PenstockError(
                "a Carry was put into twice in one slice; put once, and give a layer that is used at several places of "
                "the model a Carry for each use"
            )
        if self._records_gradients and not torch.is_grad_enabled():
            raise PenstockError(
                "a Carry was put into where gradients are off, so those of later slices would be lost; put outside of "
                "no_grad(), and checkpoint with use_reentrant=False"
            )
        self._new_value = (value,)

    def begin_slice(self, before: Any, *, keeps: bool) -> None:
        """Begin a forward, or a recomputation of it, after slices that put `before`; `keeps` says if `put` counts."""
        self._earlier_value, self._new_value = (before,), ()
        self._keeps, self._records_gradients = keeps, torch.is_grad_enabled()

    def end_slice(self) -> Any:
        """Forget everything, and return what was put; None where nothing was."""
        new_value = self._new_value[0] if self._new_value else None
        self._earlier_value, self._new_value, self._keeps = (), (), False
        return new_value
