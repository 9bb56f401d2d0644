"""`Skip`: what a layer hands to layers further on, past those between them."""

import threading
from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.skipping import SkipBuffer


class Skip(nn.Module):
    """A submodule without parameters, through which one layer puts a value that later layers get.

        class Down(nn.Module):
            def __init__(self):
                super().__init__()
                self.skip = Skip("features")

            def forward(self, features):  # [batch, width]
                self.skip.put(features)
                return features.relu()

        class Up(nn.Module):
            def __init__(self):
                super().__init__()
                self.skip = Skip("features")

            def forward(self, features):
                return features + self.skip.get()

    Of all layers that hold a `Skip` of one name, the first puts, once in its forward, and each of the others may get.
    The value is a tensor or a tree of tensors and plain values; gradients of all that got it add up.

    Code that runs a model in parts brings the value past all parts between, whose messages grow by its bytes each, and
    calls `begin_skips` and `end_skips` around each forward. On a single device the model runs as it is if its layers
    hold one and the same object, or once `connect_skips` was called; a value then stays until the next is put. A
    layer that is checkpointed gets it again in the backward, so run that before the next forward.

    Raises:
        ConfigError: if the name is empty.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if not name:
            raise ConfigError("a Skip has no name; give the one by which the layers that get find it", key="name")
        self.name = name
        self._shared_buffer: SkipBuffer = _SharedBuffer()
        # By thread: layers that threads run side by side, each as one rank, may hold one and the same Skip.
        self._of_threads: dict[int, SkipBuffer] = {}

    def put(self, value: Any) -> None:
        """Hand a value on to the layers that get it.

        Raises:
            PenstockError: a second value, or one whose gradient could not come back.
        """
        self._current().put(self.name, value)

    def get(self) -> Any:
        """Return the value that was put.

        Raises:
            PenstockError: no layer before this one has put any, or its gradient could not go back.
        """
        return self._current().get(self.name)

    def begin_skips(self, buffer: SkipBuffer) -> None:
        """Begin a forward or a backward of layers whose values are in this buffer."""
        self._of_threads[threading.get_ident()] = buffer

    def end_skips(self) -> None:
        """End what this thread began."""
        del self._of_threads[threading.get_ident()]

    def extra_repr(self) -> str:
        """Return the name, for the text of the module."""
        return repr(self.name)

    def _current(self) -> SkipBuffer:
        buffer = self._of_threads.get(threading.get_ident())
        if buffer is not None:
            return buffer
        # Autograd computes a checkpointed forward again in a thread of its own where the device is no CPU.
        buffers = list(self._of_threads.values())
        return buffers[0] if len(buffers) == 1 else self._shared_buffer


def connect_skips(modules: Iterable[nn.Module]) -> None:
    """Let the `Skip`s of one name among these layers find each other where the model runs whole, on a single device."""
    buffer = _SharedBuffer()
    skips = (inner for module in modules for inner in module.modules() if isinstance(inner, Skip))
    for skip in skips:
        skip._shared_buffer = buffer


class _SharedBuffer:
    """The buffer of a model that runs whole; a value stays in it until the next one of its name."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SharedBuffer":
        """Return one without values: those of a forward have a graph, and are of no use to a copy of the model."""
        return _SharedBuffer()

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str) -> Any:
        if name not in self._values:
            raise PenstockError(
                f"the skip {name!r} is got before anything was put into it; let an earlier layer put, and where the "
                "model runs whole, call connect_skips(layers) once, or give the layers one and the same Skip"
            )
        return self._values[name]
