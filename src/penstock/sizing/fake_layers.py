"""Layers whose parameters and buffers have shapes and types, but no memory, however large the model is.

LayerSpec, callable ──► built on the meta device ──► fake CPU tensors in the places of meta ones
module              ──► a copy, whose parameters are fake from the start
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PartitionError, PenstockError
from penstock.models.cutting.undocumented import own_tensors_of
from penstock.models.layer import LayerSpec, built_on_meta
from penstock.sizing.undocumented import FakeTensors


class FakeLayers:
    """Builds the layers of one count; layers that share a tensor go on to share it."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` is the type of all parameters; None: as their layers have them."""
        self._dtype = dtype
        self._fakes = FakeTensors()
        self._fake_by_id: dict[int, Any] = {}
        self._originals: list[Tensor] = []
        """Tensors that have a fake; held, so that no other gets an id of theirs."""

    def build(self, layer: Any, name: str) -> nn.Module:
        """Return a layer in training mode, on fake CPU tensors.

        Raises:
            PartitionError: it cannot be built, or is no module then.
        """
        module = self._copied(layer) if isinstance(layer, nn.Module) else _built(layer, name)
        for item in module.modules():
            for tensors in own_tensors_of(item):
                tensors |= {key: self._fake(value, name) for key, value in tensors.items() if _is_to_be_fake(value)}
        return module.train()

    def like(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of the shape and type of another, in the order of its memory."""
        with self._fakes.making(), torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _copied(self, layer: nn.Module) -> nn.Module:
        """Return a copy of a module that shares no values: its parameters are on the meta device from the start."""
        configs = [module.config for module in layer.modules() if hasattr(module, "config")]
        memo: dict[int, Any] = {id(config): config for config in configs}  # as models of transformers have, unchanged
        memo |= {id(item): self._meta_parameter(item) for item in layer.parameters()}
        return copy.deepcopy(layer, memo)

    def _meta_parameter(self, parameter: nn.Parameter) -> Tensor:
        if is_lazy(parameter):
            return parameter
        if id(parameter) not in self._fake_by_id:
            self._originals.append(parameter)
            meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            self._fake_by_id[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
        copied: Tensor = self._fake_by_id[id(parameter)]
        return copied

    def _fake(self, tensor: Tensor, name: str) -> Tensor:
        if is_lazy(tensor):
            raise PartitionError(
                f"layer {name!r} has a parameter without a shape before its first input; give its module its sizes"
            )
        if id(tensor) not in self._fake_by_id:
            self._originals.append(tensor)
            fake = self.like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = fake.to(self._dtype or fake.dtype) if fake.is_floating_point() else fake
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._fake_by_id[id(tensor)] = fake
        found: Tensor = self._fake_by_id[id(tensor)]
        return found


def _is_to_be_fake(value: Any) -> bool:
    """Whether a tensor of a module is to have no values: buffers with values, as of positions, stay as they are.

    A recipe may copy a module that is there, as those of `model.source` do: its parameters have values.
    """
    return isinstance(value, Tensor) and (value.is_meta or is_lazy(value) or isinstance(value, nn.Parameter))


def _built(layer: Callable[[], Any], name: str) -> nn.Module:
    try:
        if isinstance(layer, LayerSpec):
            return built_on_meta(layer)
        with torch.device("meta"):
            module = layer()
    except PenstockError:
        raise
    except Exception as error:
        raise PartitionError(
            f"layer {name!r} cannot be built without values: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise PartitionError(f"layer {name!r} builds a {type(module).__name__}; expected an nn.Module")
    return module
