"""Where a forward looks for the products that it is to split.

A product that is split in the forward must be split where the layers run again, too. Watching every function of torch,
in the whole forward and the whole backward, always finds the same; but it costs more than most functions do. A layer of
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

from penstock.execute.split.weight_grad_mode import WeightGradMode

_Forward = Callable[..., Any]


class WatchedLayers:
    """The layers of torch's that hold certain weights."""

    def __init__(self, modules: Sequence[nn.Module], weights: frozenset[int]) -> None:
        """`weights` are ids of parameters."""
        self._mode: WeightGradMode | None = None
        self._forwards: list[tuple[dict[str, Any], _Forward]] = []
        """Per layer its attributes, and what takes its forward's place while the stage runs."""
        held: set[int] = set()
        for module in {id(each): each for root in modules for each in root.modules()}.values():
            own = weights.intersection(map(id, module.parameters(recurse=False)))
            if own and _is_of_torch(module):
                held |= own
                is_linear = type(module).forward is nn.Linear.forward
                forward = self._linear_forward(module) if is_linear else self._other_forward(module)
                self._forwards.append((module.__dict__, forward))
        self.is_complete = held == weights
        """Whether each of the weights is held by such a layer."""

    @contextmanager
    def watching(self, mode: WeightGradMode) -> Iterator[None]:
        """Have the layers' products run through a mode."""
        before, self._mode = self._mode, mode
        for attributes, forward in self._forwards:
            attributes.setdefault("forward", forward)  # unless the user has replaced it since it was looked at
        try:
            yield
        finally:
            for attributes, forward in self._forwards:
                if attributes.get("forward") is forward:
                    del attributes["forward"]
            self._mode = before

    def _linear_forward(self, module: Any) -> _Forward:
        def forward(input: Tensor) -> Any:
            if torch.compiler.is_compiling() or self._mode is None:
                return F.linear(input, module.weight, module.bias)
            return self._mode.run(F.linear, input, module.weight, module.bias)

        return forward

    def _other_forward(self, module: nn.Module) -> _Forward:
        own_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            mode = self._mode
            if torch.compiler.is_compiling() or mode is None or mode.is_watching:
                return own_forward(*args, **kwargs)
            with mode:
                return own_forward(*args, **kwargs)

        return forward


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module runs a forward that torch's own layers bring; one given to the instance is the user's."""
    return type(module).forward.__module__.startswith("torch.nn.") and "forward" not in module.__dict__
