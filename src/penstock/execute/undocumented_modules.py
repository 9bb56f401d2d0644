"""Undocumented facts of modules: where they hold parameters and submodules, and what wraps one, as DDP."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_TABLES = (attrgetter("_parameters"), attrgetter("_modules"))


class ModuleSnapshot:
    """The modules and parameters that some layers held at one moment.

    To see that a walk over the modules would find the same takes a quarter of the time of the walk. Any change is
    seen: what was added, removed, renamed or replaced, also without `setattr`.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.parameters = list(dict.fromkeys(parameter for layer in layers for parameter in layer.parameters()))
        """Parameters in the order in which the layers list them; one that two layers share comes once."""
        self._modules = [module for layer in layers for module in layer.modules()]
        tables = self._tables()
        self._sizes = list(map(len, tables))
        self._names = list(_names_in(tables))
        self._values = list(_values_in(tables))

    def is_current(self) -> bool:
        """Whether the layers still hold the same modules and parameters."""
        tables = self._tables()
        return (
            list(map(len, tables)) == self._sizes
            and list(_names_in(tables)) == self._names
            and all(map(is_, _values_in(tables), self._values))
        )

    def _tables(self) -> list[Any]:
        # The tables are looked up each time, since one may be replaced as a whole.
        return [table for tables_of in _TABLES for table in map(tables_of, self._modules)]


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let a module hold another parameter under a name, as `setattr` does, in a tenth of the time."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # such as one of nn.RNN, which has a list of them
        setattr(module, name, parameter)


def is_replicated(module: nn.Module) -> bool:
    """Whether `torch.distributed._composable.replicate` has been applied to a module."""
    return hasattr(module, "set_requires_gradient_sync") and not hasattr(module, "unshard")


def _names_in(tables: Sequence[Any]) -> chain[str]:
    return chain.from_iterable([table.keys() for table in tables if table])


def _values_in(tables: Sequence[Any]) -> chain[object]:
    return chain.from_iterable([table.values() for table in tables if table])


# ---- modules that reduce gradients by themselves

_DDP_OPTIONS = {
    "static_graph": "static_graph=True",
    "mixed_precision": "mixed_precision",
    "_delay_all_reduce_params": "delay_all_reduce_named_params",
    "_comm_hooks": "a communication hook",
    "buffer_hook": "a communication hook for buffers",
}
"""DDP's options as users write them, by the attribute that is not empty where one is used."""


def special_options(module: DistributedDataParallel) -> list[str]:
    """Name the options of DDP that make its reduction another than one plain average."""
    return [option for attribute, option in _DDP_OPTIONS.items() if getattr(module, attribute, None)]


def averages(module: DistributedDataParallel) -> bool:
    """Whether the next backward averages gradients: not within `no_sync()`."""
    return bool(module.require_backward_grad_sync)


def averaged_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP averages."""
    pairs, ignored_names = module.module.named_parameters(), module.parameters_to_ignore
    return [parameter for name, parameter in pairs if parameter.requires_grad and name not in ignored_names]


def broadcast_buffers(module: DistributedDataParallel) -> list[Tensor]:
    """Return the buffers that DDP copies from the first replica."""
    named_buffers = module.module.named_buffers() if module.broadcast_buffers else ()
    return [buffer for name, buffer in named_buffers if name not in module.parameters_to_ignore]


def has_dtensors(module: DistributedDataParallel) -> bool:
    """Whether DDP has found DTensors among the parameters, which it replaces by their local parts."""
    return any(hasattr(parameter, "_st_info") for parameter in module.parameters())
