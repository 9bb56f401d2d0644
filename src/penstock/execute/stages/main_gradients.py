"""Main gradients: those of weights in low precision, added up in float32 beside them.

A sum of many microbatches in bfloat16 loses what is small against it: its values have 8 bits. So each microbatch's
gradient, which the backward computes in the type of the weights, is added to `.main_grad` as soon as it is there, and
`.grad` is released. Megatron-LM gave them their name.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError
from penstock.execute.stages.stage import distinct

ATTRIBUTE = "main_grad"
"""Of a parameter: the sum in float32 (float64 stays float64), or None."""


class MainGradients:
    """Adds up the gradients of some parameters in `.main_grad`, until the caller sets it to None."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters = [parameter for _, parameter in distinct(named_parameters)]
        for parameter in self._parameters:
            if not hasattr(parameter, ATTRIBUTE):
                setattr(parameter, ATTRIBUTE, None)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Take the gradients of every backward in here; what `.grad` held before is there again afterwards."""
        before = [(parameter, parameter.grad) for parameter in self._parameters]
        hooks = []
        for parameter in self._parameters:
            parameter.grad = None
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(_take))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient in before:
                if parameter.grad is not None:
                    _take(parameter)  # what a layer has added to `.grad` by itself, past the hooks
                parameter.grad = gradient


def main_type(parameter: Tensor) -> torch.dtype:
    """Return the type that a parameter's main gradient has."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _take(parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return  # a function of the user's has returned None, for which torch calls hooks, too
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    total = getattr(parameter, ATTRIBUTE)
    if total is None:
        setattr(parameter, ATTRIBUTE, gradient.to(main_type(parameter), copy=True))  # its memory may be another's, too
    else:
        total.add_(gradient)


def require_shapes(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Make sure that every parameter can have a main gradient.

    Raises:
        ConfigError: one has no shape before its first input.
    """
    for name, parameter in named_parameters:
        if is_lazy(parameter):
            raise ConfigError(
                f"{name!r} has no shape before its first input, so nothing can be added up beside it; give its layer "
                "its sizes when it is built",
                key="main_gradients",
            )
