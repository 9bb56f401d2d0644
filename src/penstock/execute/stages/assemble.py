"""From a list of layers to the stages of one rank: builds only what the rank holds, and finds tied parameters.

Parameters are tied where a layer's `tied` says so, where the caller does, where two modules hold one and the same
parameter, and where routes run copies of one stage on different ranks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError, nearest
from penstock.execute.parameters.tied import TiedCopy
from penstock.execute.stages.layers import Layer, build_layer, layer_names, own_ties
from penstock.execute.stages.names import full_name, named_parameters
from penstock.execute.stages.skips import StageSkips, open_at
from penstock.execute.stages.stage import Stage, distinct
from penstock.execute.undocumented import has_hooks
from penstock.execute.values.tensors import is_dtensor
from penstock.ir.measured import ImmediateWeights
from penstock.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The part of the model that one rank holds, and which parameters are tied over ranks."""

    stages: list[Stage]
    tied_groups: tuple[tuple[int, ...], ...]
    """Per parameter or stage that several ranks hold, one stage of each, the owner's first; the same on all ranks."""
    tied_copies: dict[int, TiedCopy]
    """The copy of each group that this rank belongs to, by the group's index."""
    owner_names: Mapping[str, str]
    """The owner's name of each parameter that this rank holds under another one, by this rank's name. Where this rank
    does not hold the owner's layer, it is the first of all names in the group."""
    skips: Mapping[int, StageSkips] = field(default_factory=dict)
    """By index of a stage, the skips that its layers hold or that go past it, if any."""
    shared_buffers: Sequence[tuple[str, str]] = ()
    """Names of buffers of this rank that layers of other ranks hold too, each with a name there."""

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of all stages of this rank."""
        return [layer for stage in self.stages for layer in stage.modules]

    def keyword_names(self) -> dict[int, set[str]]:
        """Return, per stage of this rank, the keyword arguments that its layers can take."""
        return {stage.index: stage.keyword_names() for stage in self.stages}

    def early_weights(self) -> dict[int, ImmediateWeights]:
        """Return, per stage of this rank whose backwards are split, the weight gradients that I computes."""
        immediate_by_stage = {stage.index: stage.split_planner.immediate for stage in self.stages}
        return {index: immediate for index, immediate in immediate_by_stage.items() if immediate is not None}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters in the order of the unsplit model, each once and under its first name there."""
        stages = sorted(self.stages, key=lambda stage: stage.first_layer)
        return distinct(chain.from_iterable(stage.named_parameters() for stage in stages))

    def parameters_by_name(self, layers: Collection[int] | None = None) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by all their names in the unsplit model.

        `layers` are ids of layers of this rank; the parameters of the others are left out then.
        """
        return {
            full: parameter
            for stage in self.stages
            for name, layer in stage.layers.items()
            if layers is None or id(layer) in layers
            for full, parameter in named_parameters(name, layer, remove_duplicate=False)
        }


def assemble(
    layers: Sequence[Layer],
    placement: Placement,
    layers_of_stage: Sequence[range],
    rank: int,
    *,
    device: torch.device,
    names: Sequence[str] = (),
    built: Mapping[int, nn.Module] = MappingProxyType({}),
    tied: Iterable[tuple[str, str]] = (),
    shares_modules: bool = False,
) -> Assembly:
    """Build the stages of one rank, and find which parameters are tied: one parameter under several names.

    `layers_of_stage[stage]` has the indices of the layers of each stage. `names` are the names of the layers, which
    need be given only where a container has named them. `built` has layers of this rank, by index, that have been
    built already. `tied` has pairs of names of parameters that the caller ties.

    A route is a whole copy of the model, as a chain of stages; a bidirectional schedule has two. Copies of a layer on
    one rank are one module; on several ranks their parameters are tied. `shares_modules` says that ranks are threads
    of one process, which may hold the very same modules. Then a rank takes a deep copy of every module whose first
    copy belongs to another rank, and of every module that shares a parameter with such a module.

    Raises:
        PartitionError: if a layer is neither a module nor builds one, or a tie names an unknown layer or parameter.
    """
    names = names or layer_names(layers)
    built_layers: dict[str, nn.Module] = {}
    stages = []
    copied_indices = _copied_layers(layers, placement, layers_of_stage, rank) if shares_modules else set()
    # All deep copies use one memo, so that modules which share a parameter still share it in their copies.
    copy_memo: dict[int, Any] = {}
    # Build each layer of this rank once, though several routes may run it.
    for stage in placement.stages_of_rank[rank]:
        for index in layers_of_stage[stage]:
            if names[index] not in built_layers:
                layer = built.get(index, layers[index])
                module = build_layer(layer, names[index], copy_memo if index in copied_indices else None)
                built_layers[names[index]] = module.to(device)
        stage_layers = {names[index]: built_layers[names[index]] for index in layers_of_stage[stage]}
        stages.append(Stage(stage, stage_layers, layers_of_stage[stage].start))
    # Every rank computes the same groups of tied names, also for layers that it does not hold.
    stages_of_layer: dict[str, list[int]] = {}
    for stage in (stage for route in placement.routes for stage in route):
        for index in layers_of_stage[stage]:
            stages_of_layer.setdefault(names[index], []).append(stage)
    groups = _tied_names(layers, names, _homes(layers, names), tied)
    return _Ties(stages_of_layer, placement, rank, built_layers).assembly(stages, groups)


def _copied_layers(
    layers: Sequence[Layer], placement: Placement, layers_of_stage: Sequence[range], rank: int
) -> set[int]:
    """Return the indices of the layers that a rank must copy, since another thread of the process uses them in place.

    Those are the layers whose first copy is another rank's, and those that share a parameter with one.
    """
    # The rank that uses a parameter in place, by the id of the parameter: the rank of the first stage that has it.
    rank_by_parameter: dict[int, int] = {}
    copied_indices = set()
    for stage in placement.routes[0]:
        owner = placement.rank_of_stage[stage]
        for index in layers_of_stage[stage]:
            layer = layers[index]
            parameters = layer.parameters() if isinstance(layer, nn.Module) else ()
            owners = {rank_by_parameter.setdefault(id(parameter), owner) for parameter in parameters}
            if isinstance(layer, nn.Module) and owners | {owner} != {rank}:
                copied_indices.add(index)
    return copied_indices


def with_skips(
    assembly: Assembly, layers_of_stage: Sequence[range], skips_of_layer: Mapping[int, Sequence[str]]
) -> Assembly:
    """Find which skips the layers of each stage hold and which go past it, by the names of each layer's."""
    holders: dict[str, list[int]] = {}
    for index in sorted(skips_of_layer):
        for name in skips_of_layer[index]:
            holders.setdefault(name, []).append(index)
    skips = {}
    for stage in assembly.stages:
        own_layers = layers_of_stage[stage.index]
        arriving = open_at(own_layers.start, holders)
        leaving = open_at(own_layers.stop, holders)
        skips[stage.index] = StageSkips(stage.modules, arriving, leaving, f"stage {stage.index}")
    return replace(assembly, skips={index: skip for index, skip in skips.items() if not skip.is_empty})


def _homes(layers: Sequence[Layer], names: Sequence[str]) -> dict[str, str]:
    """Return the layer of each parameter that a layer with full names holds: its prefix does not tell the layer."""
    homes: dict[str, str] = {}
    for name, layer in zip(names, layers, strict=True):
        if getattr(layer, "has_full_names", False) is True:
            tied_names = (pair[0] for pair in own_ties(layer))
            params = layer.named_parameters(remove_duplicate=False) if isinstance(layer, nn.Module) else ()
            homes |= dict.fromkeys([*tied_names, *(full for full, _ in params)], name)
    return homes


def _tied_names(
    layers: Sequence[Layer], names: Sequence[str], homes: Mapping[str, str], tied: Iterable[tuple[str, str]]
) -> list[dict[str, str]]:
    """Return the groups of names that mean one parameter, each name with its layer, in the order of the layers."""
    pairs = list(tied)
    for name, layer in zip(names, layers, strict=True):
        pairs += [(full_name(name, layer, local_name), tied_name) for local_name, tied_name in own_ties(layer)]
    pairs += _shared_objects(layers, names)
    groups: list[set[str]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]  # a pair may join groups
        if len(touching) == 1 and touching[0].issuperset(pair):
            # Where an earlier pipeline has made two names of a rank one object, only that rank finds this pair. The
            # group keeps its place, since all ranks number the groups by their order.
            continue
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    position = {name: index for index, name in enumerate(names)}
    layers_of_groups = [{full: _layer_of(full, names, homes) for full in group} for group in groups]
    return [
        dict(sorted(layer_by_name.items(), key=lambda item: (position[item[1]], item[0])))
        for layer_by_name in layers_of_groups
    ]


def _shared_objects(layers: Sequence[Layer], names: Sequence[str]) -> list[tuple[str, str]]:
    first_names: dict[int, str] = {}
    pairs = []
    for name, layer in zip(names, layers, strict=True):
        if not isinstance(layer, nn.Module):
            continue
        for full, parameter in named_parameters(name, layer):
            first_name = first_names.setdefault(id(parameter), full)
            if first_name != full:
                pairs.append((first_name, full))
    return pairs


def _layer_of(parameter_name: str, names: Sequence[str], homes: Mapping[str, str]) -> str:
    """Return the layer that a parameter's full name belongs to."""
    if parameter_name in homes:
        return homes[parameter_name]
    matching_layers = [name for name in names if parameter_name.startswith(f"{name}.")]
    if not matching_layers:
        raise PartitionError(
            f"a tied parameter is named {parameter_name!r}, but no layer has that prefix; the layers are "
            f"{', '.join(names)}.{nearest(parameter_name.split('.')[0], names)}"
        )
    return max(matching_layers, key=len)


@dataclass(frozen=True, slots=True, eq=False)
class _Ties:
    """Turns groups of names, and copies of stages, into shared objects on this rank and copies over ranks."""

    stages_of_layer: Mapping[str, Sequence[int]]
    """Per layer the stages that hold it, in the order of the routes."""
    placement: Placement
    rank: int
    layers: Mapping[str, nn.Module]
    """The layers of this rank."""

    def assembly(self, stages: list[Stage], groups: Sequence[Mapping[str, str]]) -> Assembly:
        """Tie parameters on this rank, and return its stages with all that is tied over several ranks.

        `groups` has one mapping per tied parameter: all its names, each with the name of its layer, in the order of
        the model. Copies of a stage in two routes are tied whole. Every rank numbers the groups and these copies alike,
        since programs name them by their numbers, so it also counts those that it holds no part of.
        """
        tied_groups: list[tuple[int, ...]] = []
        local_copies: dict[int, TiedCopy] = {}
        owner_names: dict[str, str] = {}
        for group in groups:
            # On one rank, all names of the group become one object.
            local_group = {name: layer for name, layer in group.items() if layer in self.layers}
            parameter = self._share(local_group)
            # The first layer of the group owns the parameter: its name is the one that checkpoints use.
            listed_names = {layer: self._listed_name(layer, parameter) for layer in local_group.values()}
            first_name, first_layer = next(iter(group.items()))
            owner_name = listed_names.get(first_layer, first_name)
            owner_names |= dict.fromkeys([*local_group, *listed_names.values()], owner_name)
            owner_names.pop(listed_names.get(first_layer, ""), None)
            # On several ranks, the object of each rank is a copy whose gradients the ranks add up.
            holders = self._holders(stage for layer in group.values() for stage in self.stages_of_layer[layer])
            if len(holders) < 2:
                continue  # one object on one rank: autograd adds up its uses by itself
            if parameter is not None:
                local_copies[len(tied_groups)] = TiedCopy({next(iter(local_group)): parameter}, list(holders))
            tied_groups.append(tuple(holders.values()))
        # With two routes, the n-th stages of both are copies of each other, and may lie on two ranks.
        for copies_of_stage in zip(*self.placement.routes, strict=True):
            holders = self._holders(copies_of_stage)
            if len(holders) < 2:
                continue
            if self.rank in holders:
                stage = next(stage for stage in stages if stage.index == holders[self.rank])
                local_copies[len(tied_groups)] = _copy_of_stage(stage, local_copies.values(), list(holders))
            tied_groups.append(tuple(holders.values()))
        return Assembly(stages, tuple(tied_groups), local_copies, owner_names)

    def _listed_name(self, layer: str, parameter: nn.Parameter | None) -> str:
        """Return the name under which a layer lists a parameter that it may hold twice."""
        return next(name for name, listed in named_parameters(layer, self.layers[layer]) if listed is parameter)

    def _holders(self, stages: Iterable[int]) -> dict[int, int]:
        """Return one of some stages per rank that holds any, by rank, in the order of the stages."""
        holders: dict[int, int] = {}
        for stage in stages:
            holders.setdefault(self.placement.rank_of_stage[stage], stage)
        return holders

    def _share(self, layer_of: Mapping[str, str]) -> nn.Parameter | None:
        """Make all these names of this rank one object and return it; each is of a layer."""
        if not layer_of:
            return None
        first_name, *names = layer_of
        shared = self._parameter(first_name, layer_of[first_name])
        _require_whole(first_name, shared)
        for name in names:
            parameter = self._parameter(name, layer_of[name])
            if parameter.shape != shared.shape:
                raise PartitionError(
                    f"{first_name!r} {tuple(shared.shape)} and {name!r} {tuple(parameter.shape)} are tied but "
                    "differ in shape; tie parameters of one shape"
                )
            _replace(name, self.layers[layer_of[name]], parameter, shared)
        return shared

    def _parameter(self, name: str, layer: str) -> nn.Parameter:
        parameter = dict(named_parameters(layer, self.layers[layer], remove_duplicate=False)).get(name)
        if parameter is None:
            raise PartitionError(f"{name!r} is tied but is no parameter of its layer; name one of its parameters")
        return parameter


def _replace(name: str, layer: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put one parameter in the place of another wherever a layer holds it, which names do not tell: some wrappers
    leave themselves out of them, and a layer may hold a parameter twice."""
    if old is not new and has_hooks(old):
        raise PartitionError(
            f"{name!r} is tied to a parameter before it, which takes its place, but has hooks that would be lost; "
            "register them on the parameter of the first layer"
        )
    for module in layer.modules():
        for parameter_name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, parameter_name, new)


def _copy_of_stage(stage: Stage, tied_copies: Iterable[TiedCopy], ranks: Sequence[int]) -> TiedCopy:
    """Return a whole stage as a copy, without the parameters that other copies reduce already."""
    reduced_ids = {id(parameter) for tied_copy in tied_copies for parameter in tied_copy.parameters.values()}
    parameters = {name: parameter for name, parameter in stage.named_parameters() if id(parameter) not in reduced_ids}
    for name, parameter in parameters.items():
        _require_whole(name, parameter)
    return TiedCopy(parameters, ranks, list(stage.layers.values()))


def _require_whole(name: str, parameter: nn.Parameter) -> None:
    if is_dtensor(parameter):
        raise PartitionError(
            f"{name!r} is a DTensor, and held by several stages; tied parameters and schedules of two routes need "
            "plain ones: leave its layer out of fully_shard or parallelize_module, or put what is tied into one layer"
        )
