"""`PartState`: an object that the forward gives to its submodules and that these fill, such as a cache of keys.

    one process    blocks.0 and blocks.1 fill one cache            the forward reads its length
    parts          each part has a cache of its own, which its     all read one length, which stays the same
                   submodules fill and no other part sees          while a forward runs

Such an object is refused in general: other stages do not see what a submodule does to an argument. A `PartState` is
taken, since its class promises that a submodule needs nothing that submodules of other parts put there.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

from penstock.models.cutting.trees import items_in


class PartState(ABC):
    """What the submodules of one part keep in an argument for later forwards."""

    @property
    @abstractmethod
    def common(self) -> Hashable:
        """What the forward around the submodules reads of it: equal in all parts, and constant within a forward."""

    @abstractmethod
    def without_values(self) -> Any:
        """Return what takes its place where a submodule runs without values; it may be filled, and is thrown away."""


def has_part_state(value: Any) -> bool:
    """Whether a tree holds a `PartState`."""
    return any(isinstance(item, PartState) for item in items_in(value))
