"""Refuses steps that change a buffer which several ranks hold, such as the running statistics of a shared BatchNorm.

    norm = nn.BatchNorm1d(8)
    layers = [norm, nn.Linear(8, 8), norm, ...]      on two ranks, each counts its own uses; one process counts both

A table that stays as it is does no harm. Nor do buffers that are not saved, which layers compute anew.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PipelineError
from penstock.execute.observing.observer import Observer
from penstock.execute.stages.names import full_name
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step
from penstock.execute.undocumented import version_of

Pair = tuple[str, str]


def shared_buffers(
    layers: Mapping[int, Any], own: Collection[int], names: Sequence[str], rank_of_layer: Sequence[int]
) -> list[Pair]:
    """Return the names of the buffers of `own` layers that a layer of another rank holds too, with one name there.

    `layers` are those that this rank has or can see, by index; `rank_of_layer` is the rank that runs each one's first
    copy.
    """
    holders: dict[int, list[tuple[int, str]]] = {}  # by id of a buffer
    modules = {index: layer for index, layer in layers.items() if isinstance(layer, nn.Module)}
    for index, layer in modules.items():
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            holders.setdefault(id(buffer), []).append((index, name))
    found = []
    for places in holders.values():
        for index, name in places:
            others = [place for place in places if rank_of_layer[place[0]] != rank_of_layer[index]]
            if index in own and others and name in layers[index].state_dict():
                other, own_name = others[0]
                elsewhere = full_name(names[other], layers[other], own_name)
                found.append((full_name(names[index], layers[index], name), elsewhere))
    return found


class _Kept(NamedTuple):
    """A buffer as it was at the begin of a step."""

    buffer: Tensor
    version: int
    values: Tensor


class SharedBuffers(Observer):
    """Compares the shared buffers of one rank before and after each training step."""

    def __init__(self, stages: Sequence[Stage], pairs: Sequence[Pair]) -> None:
        self._others = dict(pairs)
        self._holders = {
            full: _holder(layer, own)
            for stage in stages
            for name, layer in stage.layers.items()
            for own, _ in layer.named_buffers(remove_duplicate=False)
            if (full := full_name(name, layer, own)) in self._others
        }
        self._kept: dict[str, _Kept] = {}
        self._is_first = True

    def begin(self, step: Step) -> None:
        if not step.is_training:
            return
        for name, buffer in self._buffers():
            kept = self._kept.get(name)
            # A caller may load other values between steps.
            if kept is None or kept.buffer is not buffer or kept.version != version_of(buffer):
                self._kept[name] = _Kept(buffer, version_of(buffer), buffer.clone())

    def end(self, step: Step, failed: bool) -> None:
        if failed or not step.is_training:
            return
        for name, buffer in self._buffers():
            kept = self._kept.get(name)
            if kept is None:
                continue
            # A change through `.data` leaves the version as it is. So values are compared once in any case.
            # DistributedDataParallel and second routes copy equal values, and the version rises.
            is_same = kept.buffer is buffer and kept.version == version_of(buffer)
            if (self._is_first or not is_same) and not _is_equal(buffer, kept.values):
                raise PipelineError(
                    f"this step has changed {name!r}, which is the buffer {self._others[name]!r} of another rank too. "
                    "Each rank would change a copy of its own by its own uses, as the running statistics of a shared "
                    "BatchNorm. Give each layer a module of its own, put the module into evaluation mode (eval()), or "
                    "split the model so that one rank has both layers"
                )
        self._is_first = False

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for full, (module, name) in self._holders.items():
            buffer = getattr(module, name, None)
            if isinstance(buffer, Tensor) and not is_lazy(buffer):
                yield full, buffer


def _holder(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return layer.get_submodule(path), own


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_nan = (one != one) & (other != other)
    return bool(torch.all((one == other) | is_nan))
