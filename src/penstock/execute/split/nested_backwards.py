"""Finds the backwards that run within a backward, such as those of reentrant checkpointing.

Reentrant checkpointing refuses a backward to chosen leaves, but only of the graph that it is a node of. In its own
backward it runs its layers again and then a backward through their new graph, and that can be run in two parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

RunBackward = Callable[[Sequence[GradientEdge], Sequence[Tensor]], None]
"""Runs a backward that adds to the gradients of all leaves."""


class NestedBackwards(TorchFunctionMode):
    """Has the backwards to all leaves that are called meanwhile run by another function."""

    def __init__(self, run: RunBackward) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; a backward in another way, if gradients are all that comes of it."""
        kwargs = kwargs or {}
        # A layer that is run again may take gradients, too, to use them at once: gradients are enabled there.
        if func is torch.autograd.backward and not torch.is_grad_enabled() and not _asks_for_more(kwargs):
            tensors, gradients = args[0], _listed(kwargs.get("grad_tensors"))
            if _are_tensors(tensors) and _are_tensors(gradients) and len(tensors) == len(gradients):
                self._run([get_gradient_edge(tensor) for tensor in tensors], gradients)
                return None
        return func(*args, **kwargs)


def _asks_for_more(kwargs: Mapping[str, Any]) -> bool:
    """Whether the graph is to be kept, or to grow, or only some leaves get their gradients."""
    return bool(kwargs.get("retain_graph") or kwargs.get("create_graph")) or kwargs.get("inputs") is not None


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors or ())


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)
