"""Layers of other ranks that the caller gave as modules: this rank has them, but no step of it uses or trains them.

A pipeline moves them to the meta device, where tensors have shapes but no memory. Two mistakes then are errors, which
would give wrong results without a message: the state of the whole model taken from one rank, and gradients clipped by
their norm on one rank. Tensors that layers of this rank use too stay as they are. An optimizer that was made before the
pipeline keeps the tensors that were there, and trains this rank's own.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError
from penstock.execute.stages.layers import Layer


def free_other_layers(layers: Sequence[Layer], local_layers: Mapping[int, nn.Module]) -> None:
    """Move parameters and buffers of the modules that are not of this rank's layers to the meta device, in place.

    `local_layers` are the layers that this rank runs, by their index. Freed parameters get a gradient on the meta
    device too, so that a norm over gradients of both kinds is an error.
    """
    local_parts = [(*layer.modules(), *layer.parameters(), *layer.buffers()) for layer in local_layers.values()]
    local_ids = set(map(id, chain.from_iterable(local_parts)))
    freed_tensors: dict[int, Tensor] = {}
    for index, layer in enumerate(layers):
        if index in local_layers or not isinstance(layer, nn.Module):
            continue
        for part in layer.modules():
            if id(part) in local_ids:
                continue
            for name, tensor in _tensors_of_part(part, local_ids):
                setattr(part, name, freed_tensors.setdefault(id(tensor), _on_meta(tensor)))
            # Each part refuses: the model that a layer was cut out of has its submodules, and not the layer.
            part.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]
            part.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]


def _tensors_of_part(part: nn.Module, local_ids: Collection[int]) -> list[tuple[str, Tensor]]:
    named_tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    return [(name, tensor) for name, tensor in named_tensors if id(tensor) not in local_ids and not _is_free(tensor)]


def _is_free(tensor: Tensor) -> bool:
    return tensor.is_meta or is_lazy(tensor)


def _on_meta(tensor: Tensor) -> Tensor:
    values = torch.empty_like(tensor, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return values
    freed = nn.Parameter(values, requires_grad=tensor.requires_grad)
    if freed.requires_grad:
        # Like `tensor`, not like `values`: from a meta tensor torch takes a path that imports sympy, for 0.4 s.
        freed.grad = torch.empty_like(tensor, device="meta")
    return freed


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise _freed(
        prefix,
        "which freed it here: this rank does not have the state of the whole model. Call "
        "pipeline.state_dict(on_rank=0) on every rank; it returns the whole state on rank 0",
    )


def _refuse_loading(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
    raise _freed(
        prefix,
        "and was freed here, so it cannot be loaded. Call pipeline.load_state_dict(state) on every rank; each takes "
        "its part",
    )


def _freed(prefix: str, problem: str) -> ConfigError:
    layer = prefix.rstrip(".") or "the top"
    return ConfigError(f"the layer at {layer!r} is another rank's, {problem}", key="frees_other_stages")
