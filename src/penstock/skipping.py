"""The protocols of values that layers hand to later layers: models follow one, what runs them in parts the other."""

from typing import Any, Protocol


class SkipBuffer(Protocol):
    """Holds values between the layer that puts them and those that get them."""

    def put(self, name: str, value: Any) -> None:
        """Keep a value under a name."""
        ...

    def get(self, name: str) -> Any:
        """Return what was put under a name; every time the same."""
        ...


class Skipping(Protocol):
    """A module of a layer that hands something on to later layers, such as `ps.Skip`."""

    name: str

    def begin_skips(self, buffer: SkipBuffer) -> None:
        """Begin a forward or a backward of the layer; what it puts and gets is in this buffer."""
        ...

    def end_skips(self) -> None:
        """End what was begun, even if it failed."""
        ...
