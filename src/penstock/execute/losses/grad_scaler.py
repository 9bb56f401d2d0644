"""Keeps the `torch.amp.GradScaler`s of all ranks in step, where `scale_loss` is a method of one.

Every rank has its own scaler, which sees that rank's gradients alone. Without an exchange one rank would skip an
optimizer step that the others take, and later unscale gradients by another number than the losses were scaled by.
Only public methods of a scaler are called.
"""

import math
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from penstock.execute.control.collectives import Control
from penstock.execute.losses.loss import Scale
from penstock.execute.values.tensors import local_part


def grad_scaler_of(scale: float | Scale | None) -> GradScaler | None:
    """Return the scaler that `scale_loss` is a method of; None for anything else, and for a scaler that is disabled."""
    owner = getattr(scale, "__self__", None)
    return owner if isinstance(owner, GradScaler) and owner.is_enabled() else None


def describe_scale(scale: float | Scale | None) -> str:
    """Say what scales the losses, in a text that is the same on ranks that scale alike."""
    scaler = grad_scaler_of(scale)
    if scaler is not None:
        return f"a GradScaler with {scaler.state_dict()}"
    return "a function" if callable(scale) else str(scale)


class SharedScaler:
    """One rank's scaler, which takes the decisions of all ranks; every rank has one and calls it alike."""

    def __init__(self, scaler: GradScaler, control: Control, device: torch.device, gradient_attribute: str) -> None:
        self._scaler = scaler
        self._control = control
        self._device = device
        self._attribute = gradient_attribute
        # torch creates the scale in the first scale(), which only ranks that compute losses call.
        scaler.scale(torch.zeros((), device=device))
        self._stand_ins = {False: _stand_in(0.0, device), True: _stand_in(math.inf, device)}

    @property
    def scale(self) -> float:
        """The factor that losses are multiplied by now."""
        return self._scaler.get_scale()

    def share(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the scalers of all ranks see whether any gradient of any rank is infinite or not a number; a collective.

        If one is, the gradients of all ranks become NaN, so that every scaler skips the step of every optimizer.
        """
        grads = [getattr(parameter, self._attribute, None) for parameter in parameters]
        gradients = [grad for grad in grads if grad is not None]
        if self._control.places.data is not None:
            gradients = list(map(local_part, gradients))
        overflows = not all(self._control.all_gather_object(_are_finite(gradients)))
        if not gradients:
            # The scaler checks a gradient in place of this rank's own, of which there is none: otherwise torch refuses
            # `update()` on this rank, and its scale stays behind those of the other ranks. `unscale_` raises if the
            # stand-in was checked since the last update(), as where several steps are accumulated.
            with suppress(RuntimeError):
                self._scaler.unscale_(self._stand_ins[overflows])
        elif overflows:
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(math.nan)


def _stand_in(gradient: float, device: torch.device) -> Optimizer:
    """Return an optimizer that holds one gradient and is never stepped."""
    parameter = nn.Parameter(torch.zeros((), device=device))
    parameter.grad = torch.full((), gradient, device=device)
    return SGD([parameter])


def _are_finite(gradients: Iterable[Tensor]) -> bool:
    # Of a sparse gradient, each entry counts and not their sums, as for torch: an infinite one times 0 is NaN.
    values = [(grad * 0).coalesce().values() if grad.is_sparse else grad for grad in gradients]
    # The host waits once for the device, for all gradients together.
    return not values or bool(torch.stack([torch.isfinite(value).all() for value in values]).all())
