"""Finds parameters that the builders of several layers share, so that they can be tied where they lie on several ranks.

    table = nn.Parameter(...)
    layers = [LayerSpec("in", lambda: Embedding(table)), ..., LayerSpec("out", lambda: Head(table))]

On one rank both layers hold the one `table`. On two ranks each process builds one of them, with a `table` of its own.
A rank notices that a layer which it has just built holds a tensor that was there before. Only then does it ask the
builders of the other ranks' layers, on the meta device, which of them hold it too.
"""

import gc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.execute.stages.assemble import Layer, build_layer
from penstock.execute.transport.protocol import Transport
from penstock.execute.world import shares_process

Pair = tuple[str, str]


class _BuiltOnce:
    """A layer's builder that builds at its first call and then gives the same module; else it is like the builder."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._module: Any = None

    def __call__(self) -> Any:
        if self._module is None:
            self._module = self._builder()
        return self._module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltLayers:
    """A model's layers, of which those of one rank are built."""

    layers: Sequence[Layer]
    shared: Sequence[Pair]
    """Names of one parameter: that of a layer of this rank, and that of another rank's."""


def build_own(layers: Sequence[Layer], names: Sequence[str], own: Collection[int]) -> BuiltLayers:
    """Build this rank's layers, whose indices are `own`, and look what their builders share with others.

    Raises:
        PartitionError: a layer cannot be built.
    """
    lazy = [index for index in own if not isinstance(layers[index], nn.Module)]
    if len(own) == len(layers) or not lazy:
        return BuiltLayers(layers, ())
    layers = [_BuiltOnce(layer) if index in lazy else layer for index, layer in enumerate(layers)]
    before = _tensors()
    kept: dict[int, str] = {}
    for index in lazy:
        for name, parameter in _named_parameters(build_layer(layers[index], names[index]), names[index]):
            if id(parameter) in before:
                kept.setdefault(id(parameter), name)
    others = [index for index in range(len(layers)) if index not in own] if kept else []
    shared = [
        (kept[id(parameter)], name)
        for index in others
        for name, parameter in _named_parameters(_glance(layers[index]), names[index])
        if id(parameter) in kept
    ]
    return BuiltLayers(layers, shared)


def gather_shared_names(transport: Transport, built: BuiltLayers) -> list[Pair]:
    """Return the names of one parameter that any rank has found; a collective.

    Raises:
        PartitionError: on every rank alike, if the ranks are threads of one process, and so hold the very same object.
    """
    everyone = transport.all_gather_object(list(built.shared))
    shared = [(str(one), str(other)) for pairs in everyone if isinstance(pairs, list) for one, other in pairs]
    if shared and shares_process(transport):
        raise PartitionError(
            f"{shared[0][0]!r} and {shared[0][1]!r} are one parameter, which the builders of two layers share, but "
            "ranks that are threads of one process would both add to its gradient; let each builder make a parameter "
            "of its own, and tie the two by name, as in tied=[('0.weight', '5.weight')]"
        )
    return shared


def _named_parameters(module: Any, layer: str) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters():
            yield f"{layer}.{name}", parameter


def _glance(layer: Any) -> Any:
    """What a layer of another rank would hold; nothing of its own is allocated. None where that cannot be found out."""
    if isinstance(layer, nn.Module):
        return layer
    try:
        with torch.device("meta"):  # where nothing is drawn at random either
            return getattr(layer, "build", layer)()
    except Exception:  # its own rank builds it for real, and says what is wrong
        return None


def _tensors() -> frozenset[int]:
    """The ids of all tensors that there are."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    return frozenset(id(each) for each in objects if type(each) in kinds)
