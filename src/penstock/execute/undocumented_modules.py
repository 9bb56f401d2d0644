"""What torch does not document of modules: the tables with their parameters and submodules, and what wraps one."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

_TABLES = (attrgetter("_parameters"), attrgetter("_modules"))


class ModuleSnapshot:
    """The modules and parameters that some layers held at one moment.

    To see that a walk over the modules would find the same takes a quarter of the time of the walk. Whatever changes is
    seen: what was added, removed, renamed or replaced, also without `setattr`.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        """As the layers list them one after another; one that two layers share comes twice."""
        self._modules = [module for layer in layers for module in layer.modules()]
        tables = self._tables()
        self._sizes = list(map(len, tables))
        self._names = list(_names_in(tables))
        self._held = list(_held_in(tables))

    def is_current(self) -> bool:
        """Whether the layers still hold the same."""
        tables = self._tables()
        return (
            list(map(len, tables)) == self._sizes
            and list(_names_in(tables)) == self._names
            and all(map(is_, _held_in(tables), self._held))
        )

    def _tables(self) -> list[Any]:
        # Anew each time, since a table may be replaced as a whole.
        return [table for tables_of in _TABLES for table in map(tables_of, self._modules)]


def is_replicated(module: nn.Module) -> bool:
    """Whether `torch.distributed._composable.replicate` has been applied to a module."""
    return hasattr(module, "set_requires_gradient_sync") and not hasattr(module, "unshard")


def _names_in(tables: Sequence[Any]) -> chain[str]:
    return chain.from_iterable([table.keys() for table in tables if table])


def _held_in(tables: Sequence[Any]) -> chain[object]:
    return chain.from_iterable([table.values() for table in tables if table])
