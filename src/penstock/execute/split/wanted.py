"""The questions of a custom function's backward, by which I and W each compute their half.

dx = dy @ w.t() if ps.wants_input_gradient(ctx) else None
dw = x.t() @ dy if ps.wants_weight_gradient(ctx) else None
return dx, dw
"""

from enum import Enum
from typing import Any

import torch

from penstock.errors import PipelineError
from penstock.execute.undocumented import function_of

_ASKS = "_penstock_asks"
_WANTED = "_penstock_wants"


class BackwardHalf(Enum):
    """The half of a split backward that runs."""

    INPUT = "I"
    WEIGHT = "W"


def wants_input_gradient(ctx: Any) -> bool:
    """Return whether the backward of a custom function is to compute the gradients of activations.

    Call it in `backward` with its `ctx`. It is False in the `W` of a split backward. In `I`, and wherever a backward
    computes everything, it is True if any input of the function needs a gradient.

    Raises:
        PipelineError: `ctx` is none.
    """
    return _wants(ctx, BackwardHalf.INPUT, "wants_input_gradient")


def wants_weight_gradient(ctx: Any) -> bool:
    """Return whether the backward of a custom function is to compute the gradients of weights.

    Weights are the inputs that are made of parameters alone. Call it in `backward` with its `ctx`. It is False in the
    `I` of a split backward; `W` then calls the backward once more. In `W`, and wherever a backward computes everything,
    it is True if any input of the function needs a gradient.

    A function that never calls this computes the gradients of its weights in `I`.

    Raises:
        PipelineError: `ctx` is none.
    """
    return _wants(ctx, BackwardHalf.WEIGHT, "wants_weight_gradient")


def asks(function: type[torch.autograd.Function]) -> bool:
    """Whether the backward of a function has ever asked, so that each of its halves can run alone."""
    return _ASKS in vars(function)


def want(ctx: Any, half: BackwardHalf) -> None:
    """Have a context answer that one half runs."""
    setattr(ctx, _WANTED, half)


def _wants(ctx: Any, half: BackwardHalf, name: str) -> bool:
    if torch.compiler.is_compiling():  # what is compiled computes everything
        return any(ctx.needs_input_grad)
    needs_input_grad = getattr(ctx, "needs_input_grad", None)
    if needs_input_grad is None:
        raise PipelineError(
            f"{name}: expected the ctx that the backward of a torch.autograd.Function gets, got "
            f"{type(ctx).__name__}; call it within backward(ctx, ...)"
        )
    function = function_of(ctx)
    if half is BackwardHalf.WEIGHT and function is not None and not asks(function):
        setattr(function, _ASKS, True)
    wanted_half = getattr(ctx, _WANTED, None)
    return any(needs_input_grad) if wanted_half is None else wanted_half is half
