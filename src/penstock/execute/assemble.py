"""From a list of layers to the stages of one rank: builds only what the rank holds, and finds tied parameters.

A layer is a module, used in place, or a callable that builds one, such as a `LayerSpec`, whose `name` becomes the
prefix of its parameters; else its index does. Parameters are tied where a layer's `tied` says so, where the caller
does, or where two modules hold one and the same parameter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError, nearest
from penstock.execute.stage import Stage
from penstock.execute.tied import TiedCopy
from penstock.placement import Placement

Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """What one rank holds of the model, and which parameters are tied over ranks."""

    stages: list[Stage]
    tied_groups: tuple[tuple[int, ...], ...]
    """Per parameter that several ranks hold, one stage of each of them, the owner's first; the same on all ranks."""
    tied_copies: dict[int, TiedCopy]
    """Per index of a group that this rank belongs to, its copy."""
    copied_names: frozenset[str]
    """Names under which this rank holds parameters that belong to another name."""


def spec_attribute(layer: Layer, name: str, default: Any) -> Any:
    """Return what a layer's spec says of itself; a module says nothing, its attributes mean something else."""
    return default if isinstance(layer, nn.Module) else getattr(layer, name, default)


def layer_names(layers: Sequence[Layer]) -> list[str]:
    """Return the prefix of each layer's parameters.

    Raises:
        PartitionError: if two layers have the same name.
    """
    names = [str(spec_attribute(layer, "name", index)) for index, layer in enumerate(layers)]
    for name in names:
        if names.count(name) > 1:
            raise PartitionError(f"{names.count(name)} layers are named {name!r}; give each layer a name of its own")
    return names


def assemble(
    layers: Sequence[Layer],
    placement: Placement,
    slices: Sequence[range],
    rank: int,
    *,
    device: torch.device,
    tied: Iterable[tuple[str, str]] = (),
) -> Assembly:
    """Build the stages of a rank; `slices[stage]` are the indices of the stage's layers.

    Raises:
        PartitionError: if a layer is neither a module nor builds one, or a tie names an unknown layer or parameter.
    """
    names = layer_names(layers)
    stages = []
    for stage in placement.stages_of_rank[rank]:
        modules = {names[index]: _build(layers[index], names[index]).to(device) for index in slices[stage]}
        stages.append(Stage(stage, modules))
    stage_of_layer = {names[index]: stage for stage, indices in enumerate(slices) for index in indices}
    ties = _Ties(stage_of_layer, placement, rank, {stage.index: stage for stage in stages})
    groups = _tied_names(layers, names, tied)
    return ties.assembly(stages, groups)


def _build(layer: Layer, name: str) -> nn.Module:
    try:
        module = layer if isinstance(layer, nn.Module) else layer()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise PartitionError(
            f"layer {name!r} does not fit in this rank's memory ({error}); make it smaller, or use more ranks"
        ) from error
    if not isinstance(module, nn.Module):
        raise PartitionError(f"layer {name!r} builds a {type(module).__name__}; expected an nn.Module")
    return module


def _tied_names(layers: Sequence[Layer], names: Sequence[str], tied: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of parameter names that mean one parameter; the first layer's name comes first."""
    pairs = list(tied)
    for name, layer in zip(names, layers, strict=True):
        pairs += [(f"{name}.{own}", other) for own, other in spec_attribute(layer, "tied", ())]
    pairs += _shared_objects(layers, names)
    groups: list[set[str]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    position = {name: index for index, name in enumerate(names)}
    return [sorted(group, key=lambda full: (position[_layer_of(full, names)], full)) for group in groups]


def _shared_objects(layers: Sequence[Layer], names: Sequence[str]) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    pairs = []
    for name, layer in zip(names, layers, strict=True):
        if not isinstance(layer, nn.Module):
            continue
        for own, parameter in layer.named_parameters():
            known = first.setdefault(id(parameter), f"{name}.{own}")
            if known != f"{name}.{own}":
                pairs.append((known, f"{name}.{own}"))
    return pairs


def _layer_of(full_name: str, names: Sequence[str]) -> str:
    """The layer that a parameter's full name belongs to."""
    found = [name for name in names if full_name.startswith(f"{name}.")]
    if not found:
        raise PartitionError(
            f"a tied parameter is named {full_name!r}, but no layer has that prefix; the layers are "
            f"{', '.join(names)}.{nearest(full_name.split('.')[0], names)}"
        )
    return max(found, key=len)


@dataclass(frozen=True, slots=True, eq=False)
class _Ties:
    """Turns groups of names into shared objects on this rank and copies over ranks."""

    stage_of_layer: dict[str, int]
    placement: Placement
    rank: int
    stages: dict[int, Stage]

    def assembly(self, stages: list[Stage], groups: Sequence[Sequence[str]]) -> Assembly:
        tied_groups: list[tuple[int, ...]] = []
        copies: dict[int, TiedCopy] = {}
        copied: set[str] = set()
        for group in groups:
            members = [(name, self._stage(name)) for name in group]
            here = [name for name, stage in members if self._rank(stage) == self.rank]
            parameter = self._share(here)
            copied.update(name for name in here if name != group[0])
            # One stage per rank, in the order of first use; dicts keep it.
            holders = {self._rank(stage): stage for _, stage in reversed(members)}
            ranks = list(dict.fromkeys(self._rank(stage) for _, stage in members))
            if len(ranks) < 2:
                continue
            if parameter is not None:
                copies[len(tied_groups)] = TiedCopy(parameter, ranks)
            tied_groups.append(tuple(holders[rank] for rank in ranks))
        return Assembly(stages, tuple(tied_groups), copies, frozenset(copied))

    def _stage(self, name: str) -> int:
        return self.stage_of_layer[_layer_of(name, list(self.stage_of_layer))]

    def _rank(self, stage: int) -> int:
        return self.placement.rank_of_stage[stage]

    def _share(self, names: Sequence[str]) -> nn.Parameter | None:
        """Make all these names of this rank one object and return it."""
        if not names:
            return None
        first = self._parameter(names[0])
        for name in names[1:]:
            if self._parameter(name).shape != first.shape:
                raise PartitionError(
                    f"{names[0]!r} {tuple(first.shape)} and {name!r} {tuple(self._parameter(name).shape)} are tied but "
                    "differ in shape; tie parameters of one shape"
                )
            module, own = self._owner(name)
            setattr(module, own, first)
        return first

    def _parameter(self, name: str) -> nn.Parameter:
        layer = _layer_of(name, list(self.stage_of_layer))
        module = self.stages[self.stage_of_layer[layer]].layers[layer]
        parameter = dict(module.named_parameters(remove_duplicate=False)).get(name.removeprefix(f"{layer}."))
        if parameter is None:
            raise PartitionError(f"{name!r} is tied but is no parameter of its layer; name one of its parameters")
        return parameter

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds the parameter, and its name there."""
        layer = _layer_of(name, list(self.stage_of_layer))
        path, _, own = name.removeprefix(f"{layer}.").rpartition(".")
        module = self.stages[self.stage_of_layer[layer]].layers[layer]
        return module.get_submodule(path), own
