"""Where a forward looks for the products that it is to part.

What is parted in the forward must be parted where the layers run again, too. Watching every function of torch, in the
whole forward and the whole backward, always finds the same; but it costs more than most functions do. A layer of
torch's own runs its product within its own forward, and nothing of that forward runs again without the rest of it. So
linear layers are watched each by itself, and torch's other layers only while they run. A layer of the user's may have
part of its forward checkpointed, so it is not watched by itself. Modules are changed only while the stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.execute.split.parted_products import Parting

_Forward = Callable[..., Any]


@contextmanager
def watching_all(parting: Parting) -> Iterator[None]:
    """Watch every function."""
    with parting:
        yield


class WatchedLayers:
    """The layers of torch's that hold certain weights."""

    def __init__(self, modules: Sequence[nn.Module], weights: frozenset[int]) -> None:
        """`weights` are ids of parameters."""
        self._parting: Parting | None = None
        self._holders: list[_Holder] = []
        held: set[int] = set()
        for module in {id(each): each for root in modules for each in root.modules()}.values():
            own = weights.intersection(map(id, module.parameters(recurse=False)))
            if own and _is_of_torch(module):
                held |= own
                is_linear = type(module).forward is nn.Linear.forward
                self._holders.append(
                    _Holder(module, self._linear_forward(module) if is_linear else self._other_forward(module))
                )
        self.is_complete = held == weights
        """Whether each of the weights is held by such a layer."""

    @contextmanager
    def watching(self, parting: Parting) -> Iterator[None]:
        """Have the layers' products run through a parting."""
        before, self._parting = self._parting, parting
        for holder in self._holders:
            holder.exchange()
        try:
            yield
        finally:
            for holder in self._holders:
                holder.restore()
            self._parting = before

    def _linear_forward(self, module: Any) -> _Forward:
        def forward(input: Tensor) -> Any:
            if torch.compiler.is_compiling() or self._parting is None:
                return F.linear(input, module.weight, module.bias)
            return self._parting.run(F.linear, input, module.weight, module.bias)

        return forward

    def _other_forward(self, module: nn.Module) -> _Forward:
        own_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            parting = self._parting
            if torch.compiler.is_compiling() or parting is None or parting.is_watching:
                return own_forward(*args, **kwargs)
            with parting:
                return own_forward(*args, **kwargs)

        return forward


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module runs a forward that torch's own layers bring; one given to the instance is the user's."""
    return type(module).forward.__module__.startswith("torch.nn.") and "forward" not in module.__dict__


class _Holder:
    """A module, and what takes its forward's place while the stage runs."""

    __slots__ = ("_attributes", "_watched")

    def __init__(self, module: nn.Module, watched: _Forward) -> None:
        self._attributes = module.__dict__
        self._watched = watched

    def exchange(self) -> None:
        """Give the module the watched forward, unless the user has given it another since it was looked at."""
        self._attributes.setdefault("forward", self._watched)

    def restore(self) -> None:
        """Give the module its forward back."""
        if self._attributes.get("forward") is self._watched:
            del self._attributes["forward"]
