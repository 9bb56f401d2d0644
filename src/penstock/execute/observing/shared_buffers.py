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
    layers: Mapping[int, Any], local_layers: Collection[int], names: Sequence[str], rank_of_layer: Sequence[int]
) -> list[Pair]:
    """Return the names of the buffers of `local_layers` that a layer of another rank holds too, with one name there.

    `layers` are those that this rank has or can see, by index; `rank_of_layer` is the rank that runs each one's first
    copy.
    """
    holders: dict[int, list[tuple[int, str]]] = {}  # by id of a buffer
    modules = {index: layer for index, layer in layers.items() if isinstance(layer, nn.Module)}
    for index, layer in modules.items():
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            holders.setdefault(id(buffer), []).append((index, name))
    pairs = []
    for places in holders.values():
        for index, name in places:
            remote_places = [place for place in places if rank_of_layer[place[0]] != rank_of_layer[index]]
            if index in local_layers and remote_places and name in layers[index].state_dict():
                remote_layer, remote_buffer = remote_places[0]
                remote_name = full_name(names[remote_layer], layers[remote_layer], remote_buffer)
                pairs.append((full_name(names[index], layers[index], name), remote_name))
    return pairs


class _BufferState(NamedTuple):
    """A buffer as it was at the begin of a step."""

    buffer: Tensor
    version: int
    values: Tensor


class SharedBuffers(Observer):
    """Compares the shared buffers of one rank before and after each training step."""

    def __init__(self, stages: Sequence[Stage], pairs: Sequence[Pair]) -> None:
        self._remote_names = dict(pairs)
        self._holders = {
            full_buffer_name: _holder(layer, buffer_name)
            for stage in stages
            for name, layer in stage.layers.items()
            for buffer_name, _ in layer.named_buffers(remove_duplicate=False)
            if (full_buffer_name := full_name(name, layer, buffer_name)) in self._remote_names
        }
        self._states: dict[str, _BufferState] = {}
        self._is_first = True

    def begin(self, step: Step) -> None:
        if not step.is_training:
            return
        for name, buffer in self._buffers():
            state = self._states.get(name)
            # A caller may load other values between steps.
            if state is None or state.buffer is not buffer or state.version != version_of(buffer):
                self._states[name] = _BufferState(buffer, version_of(buffer), buffer.clone())

    def end(self, step: Step, failed: bool) -> None:
        if failed or not step.is_training:
            return
        for name, buffer in self._buffers():
            state = self._states.get(name)
            if state is None:
                continue
            # A change through `.data` leaves the version as it is. So values are compared once in any case.
            # DistributedDataParallel and second routes copy equal values, and the version rises.
            is_same = state.buffer is buffer and state.version == version_of(buffer)
            if (self._is_first or not is_same) and not _is_equal(buffer, state.values):
                raise PipelineError(
                    f"this step has changed {name!r}, which is the buffer {self._remote_names[name]!r} of another rank "
                    "too. Each rank would change a copy of its own by its own uses, as the running statistics of a "
                    "shared BatchNorm. Give each layer a module of its own, put the module into evaluation mode "
                    "(eval()), or split the model so that one rank has both layers"
                )
        self._is_first = False

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for full_buffer_name, (module, name) in self._holders.items():
            buffer = getattr(module, name, None)
            if isinstance(buffer, Tensor) and not is_lazy(buffer):
                yield full_buffer_name, buffer


def _holder(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, buffer_name = name.rpartition(".")
    return layer.get_submodule(path), buffer_name


def _is_equal(buffer: Tensor, values: Tensor) -> bool:
    if buffer.shape != values.shape or buffer.dtype != values.dtype:
        return False
    is_nan = (buffer != buffer) & (values != values)
    return bool(torch.all((buffer == values) | is_nan))
