"""Uses of torch that it does not document: changes in place, memory, compiled modules, buffers, hooks, kernels."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

KernelMode: Any = attrgetter("utils._python_dispatch.TorchDispatchMode")(torch)
"""A context in which each kernel that runs on this thread goes through `__torch_dispatch__`."""


def version_of(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has returned this module, whose forward is the compiler's."""
    return hasattr(module, "dynamo_ctx")


def is_saved(module: nn.Module, name: str) -> bool:
    """Whether a buffer that a module holds itself is a part of its state."""
    return name not in module._non_persistent_buffers_set


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the memory of a tensor, which its views share; None where it has none, as a sparse one."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:
        return None


def storage_key(storage: UntypedStorage) -> int:
    """Return a number that the views of one memory have in common, also on the meta device, while it is held."""
    return int(storage._cdata)


def own_tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts in which a module itself has its parameters and its buffers."""
    return module._parameters, module._buffers


def plain_attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, hooks among them, that are no parameters, buffers, submodules or modes."""
    hidden = {"_parameters", "_buffers", "_modules", "training"}
    return {name: value for name, value in vars(module).items() if name not in hidden}


def forward_hooks(module: nn.Module) -> list[tuple[Any, bool]]:
    """Return the forward hooks of a module in their order, and whether each takes keywords."""
    if not module._forward_hooks:
        return []
    return [(hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()]


def hooks_around_forward(module: nn.Module) -> list[Any]:
    """Return the hooks that a call of a module runs before and behind its forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def remove_forward_hooks(module: nn.Module, is_removed: Callable[[Any], bool]) -> None:
    """Remove some forward hooks of a module."""
    for key in [key for key, hook in module._forward_hooks.items() if is_removed(hook)]:
        del module._forward_hooks[key]


def has_further_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before its forward, or in its backward."""
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def remove_hooks_besides(module: nn.Module, kept_hooks: list[tuple[Any, bool]]) -> None:
    """Remove the hooks of a module but for some that run behind its forward."""
    if module._forward_hooks or has_further_hooks(module):
        remove_forward_hooks(module, lambda hook: all(hook is not kept for kept, _ in kept_hooks))
        for hooks in (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
