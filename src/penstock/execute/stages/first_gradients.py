"""Keeps the first gradients of parameters apart from tensors that are still needed.

    y = x + p.view(...)      dy is kept, sent or forwarded;  p.grad = dy.view(...), the same memory
                             next microbatch: p.grad += ..., which changes dy

A parameter without a gradient takes over the first one that comes if nobody holds that very tensor, without a look at
who holds its memory. In a plain loop nobody does; here a backward leaves tensors that outlive it.

So does every other leaf: a keyword of the batch that is trained, a tensor that a layer holds unregistered, a parameter
of the loss function. A split backward, which searches its graph anyway, finds them all. A whole one keeps nothing but
the gradients of its inputs, and copies those whose memory somebody else holds.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.execute.undocumented import num_holders
from penstock.execute.values.tensors import local_part


class FirstGradients:
    """The parameters of a stage to which no gradient has come yet in a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._waiting = [parameter for parameter in parameters if parameter.requires_grad]
        self._known = set(map(id, self._waiting))
        """Ids of those that needed a gradient when the step began."""

    def begin_backward(self) -> None:
        """Forget those that have a gradient by now, to which others are added."""
        if self._waiting:
            self._waiting = [parameter for parameter in self._waiting if parameter.grad is None]

    def come(self, leaves: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return what may have got its first gradient in a backward that came to `leaves`: in most, nothing."""
        if not self._waiting and not leaves:
            return []
        waiting = [parameter for parameter in self._waiting if parameter.grad is not None]
        # Of others it is not known whether they had one before. Then it shares no memory with what this backward made.
        others = [leaf for leaf in leaves if leaf.grad is not None and id(leaf) not in self._known]
        return waiting + others


def unalias(leaves: Iterable[Tensor], needed: Sequence[Tensor]) -> None:
    """After a backward: give gradients of leaves memory of their own, where it is that of `needed`."""
    memory = {_memory(tensor) for tensor in needed if tensor.layout is torch.strided}
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is not None and gradient.layout is torch.strided and _memory(gradient) in memory:
            leaf.grad = gradient.clone()


def in_own_memory(gradient: Tensor) -> Tensor:
    """Return the gradient of an input, as a copy if somebody else holds its memory, who might change it."""
    # Of subclasses, such as DTensor, nobody knows who holds their parts.
    is_alone = type(gradient) is Tensor and (gradient.layout is not torch.strided or num_holders(gradient) == 1)
    return gradient if is_alone else gradient.clone()


def _memory(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
