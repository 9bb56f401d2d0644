"""Refuses an output that was changed in place between its stage and the next one, instead of using a wrong value.

A stage may return a tensor that it goes on using, such as a buffer that its next forward adds to. On one process that
forward comes after the value was used; in a pipeline it may come before. Every tensor counts the changes made to it and
to its views (see "In-place correctness checks" in torch's notes on autograd), so to find one is to compare numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.undocumented import version_of
from penstock.execute.values.tree import as_graph_leaves, tensors_of


@dataclass(slots=True, eq=False)
class VersionGuard:
    """A tree, and the versions that its tensors had when it was put here."""

    value: Any
    versions: Sequence[int]

    @classmethod
    def of(cls, value: Any) -> Self:
        return cls(value, _versions(value))

    @classmethod
    def detached(cls, value: Any) -> Self:
        """Guard the same values as new leaves, which need a gradient where the original needs one."""
        return cls.of(as_graph_leaves(value))

    @property
    def is_changed(self) -> bool:
        """Whether a tensor has been changed in place since it was put here."""
        return _versions(self.value) != self.versions

    def checked(self, where: str) -> Any:
        """Return the tree. Raises: PipelineError, naming `where` it was made, if a tensor has been changed since."""
        if self.is_changed:
            raise PipelineError(
                f"{where}: a tensor of its output was changed in place after it had been returned and before the next "
                "stage had it, which would get a later value. Return a copy (clone()) of what layers change, such as a "
                "buffer, or let them make a new tensor instead"
            )
        return self.value


def _versions(value: Any) -> list[int]:
    if isinstance(value, Tensor):  # most outputs; this runs for every message
        return [version_of(value)]
    return [version_of(tensor) for tensor in tensors_of(value)]
