"""Where a forward looks for the products that it is to run apart from their weights.

Watching every function of torch costs more than most of them do. So linear layers are watched each by itself, and
others that hold weights in question only while they run. Modules are changed only while the stage runs.
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
    """The modules that hold certain weights."""

    def __init__(self, modules: Sequence[nn.Module], weights: frozenset[int]) -> None:
        """`weights` are ids of parameters."""
        self._parting: Parting | None = None
        self._forwards: list[_WatchedForward] = []
        for module in {id(each): each for root in modules for each in root.modules()}.values():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if weights.isdisjoint(map(id, module.parameters(recurse=False))):
                continue
            is_linear = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
            watched = self._linear_forward(module) if is_linear else self._other_forward(module)
            self._forwards.append(_WatchedForward(module, watched))

    @contextmanager
    def watching(self, parting: Parting) -> Iterator[None]:
        """Have the modules' products run through a parting."""
        before, self._parting = self._parting, parting
        for forward in self._forwards:
            forward.exchange()
        try:
            yield
        finally:
            for forward in self._forwards:
                forward.restore()
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


class _WatchedForward:
    """A module's forward, and what takes its place while the stage runs."""

    __slots__ = ("_attributes", "_before", "_watched")

    def __init__(self, module: nn.Module, watched: _Forward) -> None:
        self._attributes = module.__dict__
        self._watched = watched
        self._before: _Forward | None = self._attributes.get("forward")

    def exchange(self) -> None:
        """Give the module the watched forward."""
        self._attributes["forward"] = self._watched

    def restore(self) -> None:
        """Give the module its forward back."""
        if self._before is None:
            self._attributes.pop("forward", None)
        else:
            self._attributes["forward"] = self._before
