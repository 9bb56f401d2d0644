"""Keeps the first gradients of parameters apart from tensors that are still needed.

    y = x + p.view(...)      dy is kept, sent or forwarded;  p.grad = dy.view(...), the same memory
                             next microbatch: p.grad += ..., which changes dy

A parameter without a gradient takes over the first one that comes if nobody holds that very tensor, without a look at
who holds its memory. In a plain loop nobody does; here a backward leaves tensors that outlive it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.execute.values.tensors import local_part


class FirstGradients:
    """The parameters of a stage to which no gradient has come yet in a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._waiting = [parameter for parameter in parameters if parameter.requires_grad]

    def begin_backward(self) -> None:
        """Forget those that have a gradient by now, to which others are added."""
        if self._waiting:
            self._waiting = [parameter for parameter in self._waiting if parameter.grad is None]

    def have_come(self) -> bool:
        """Whether any came in a backward: not in most, where to list what is needed takes longer than to find this."""
        return any(parameter.grad is not None for parameter in self._waiting)

    def unalias(self, needed: Sequence[Tensor]) -> None:
        """After a backward: give gradients that have just come memory of their own, where it is that of `needed`."""
        memory = {_memory(tensor) for tensor in needed if tensor.layout is torch.strided}
        for parameter in self._waiting:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and _memory(gradient) in memory:
                parameter.grad = gradient.clone()


def _memory(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
