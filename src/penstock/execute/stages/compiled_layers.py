"""Layers that torch.compile compiles: in place, so that modules and parameters keep their names.

torch.compile(layer) returns a module around the layer, whose parameters are named `_orig_mod.weight`. Such a module is
replaced by what it holds, compiled in place by the same compiler, wherever it is in a layer.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.execute.backend import find_backend
from penstock.execute.stages.stage import Stage
from penstock.execute.undocumented_compiler import WRAPPED, compile_module, is_compiled, unwrapped

T = TypeVar("T")


def without_wrappers(layer: T) -> T | nn.Module:
    """Return a layer without the modules that torch.compile has put around it and within it; others as they are."""
    if not isinstance(layer, nn.Module):
        return layer
    for module in layer.modules():
        for name, child in module.named_children():
            if (module_and_compiler := unwrapped(child)) is not None and name != WRAPPED:
                setattr(module, name, _compiled_in_place(*module_and_compiler))
    module_and_compiler = unwrapped(layer)
    return layer if module_and_compiler is None else _compiled_in_place(*module_and_compiler)


def compile_layers(stages: Iterable[Stage], name: bool | str) -> None:
    """Compile each layer in place, unless it is already; within DistributedDataParallel, the layer that it holds.

    A layer whose own forward is no code for a compiler, such as a part of `ps.cut`, says what to compile in its place.

    Raises:
        ConfigError: there is no backend of that name.
    """
    if not name:
        return
    compiler: Any = partial(torch.compile, backend=find_backend(name))
    for layer in (layer for stage in stages for layer in stage.modules):
        module = layer.module if isinstance(layer, DistributedDataParallel) else layer
        for working_module in getattr(module, "working_modules", [module]):
            if not is_compiled(working_module):
                compile_module(working_module, compiler)


def _compiled_in_place(module: nn.Module, compiler: Any) -> nn.Module:
    compile_module(module, compiler)
    return module
