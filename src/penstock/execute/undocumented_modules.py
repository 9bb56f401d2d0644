"""Undocumented facts of modules: where they hold parameters and submodules, and what wraps one, as DDP."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
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


# ---- modules of fully_shard


def gradient_sync(module: Any) -> tuple[bool, bool]:
    """Return whether backwards reduce a module's gradients over its shards, and over the copies of its shards."""
    groups = _parameter_groups(module)
    return all(group.reduce_grads for group in groups), all(group.all_reduce_grads for group in groups)


def set_gradient_sync(module: Any, *, reduces: bool, reduces_copies: bool) -> None:
    """Set for a module, and not for its submodules, what `gradient_sync` returns."""
    module.set_requires_gradient_sync(reduces, recurse=False)
    module.set_requires_all_reduce(reduces_copies, recurse=False)


def summed_types(module: Any) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Return each shard that a module manages, and the type in which backwards that do not reduce add up."""
    policy = module._get_fsdp_state()._mp_policy
    shards = [managed.sharded_param for managed in _managed_parameters(module)]
    return [(shard, policy.reduce_dtype or policy.param_dtype or shard.dtype) for shard in shards]


def may_leave_unreduced(module: Any) -> bool:
    """Whether a backward may end without a module's reduction.

    torch 2.13 fails where the sums of a module have a type of their own, and it has not been gathered yet.
    """
    casts = module._get_fsdp_state()._mp_policy.reduce_dtype is not None
    return not casts or len(unsharded_parameters(module)) == len(_managed_parameters(module))


def unsharded_parameters(module: Any) -> list[nn.Parameter]:
    """Return the whole parameters of a module, to which autograd adds; their memory may be free."""
    return [managed._unsharded_param for managed in _managed_parameters(module) if hasattr(managed, "_unsharded_param")]


def unreduced_sums(module: Any) -> list[Tensor | None]:
    """Return the sums of whole gradients that a module keeps beside them, in another type than theirs."""
    return [managed.unsharded_accumulated_grad for managed in _managed_parameters(module)]


def drop_unreduced_sums(module: Any) -> None:
    """Drop the sums that a module keeps beside gradients: of whole ones, and of those to be reduced over copies."""
    for managed in _managed_parameters(module):
        managed.unsharded_accumulated_grad = None
    for group in _parameter_groups(module):
        group._partial_reduce_output = None


def end_reduction(module: Any) -> None:
    """Let a module that layers call, and its submodules, reduce what they have added up, as at a backward's end."""
    state = module._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()


def forget_iteration(module: Any) -> None:
    """Let a module that layers call, and its submodules, begin anew behind a forward or backward that has failed.

    Sums that are still to be reduced stay.
    """
    state = module._get_fsdp_state()
    if state._is_root and hasattr(module, "reset_iter_state"):  # torch 2.13
        groups = [group for inner in state._state_ctx.all_states for group in inner._fsdp_param_groups]
        sums = [group._partial_reduce_output for group in groups]
        module.reset_iter_state()  # it drops those to be reduced over copies
        for group, partial_sum in zip(groups, sums, strict=True):
            group._partial_reduce_output = partial_sum


def _parameter_groups(module: Any) -> Sequence[Any]:
    groups: Sequence[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def _managed_parameters(module: Any) -> list[Any]:
    return [managed for group in _parameter_groups(module) for managed in group.fsdp_params]
