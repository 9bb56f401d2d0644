"""An optimizer's state under the names of the parameters, so that any rank's optimizer can take up its part.

optimizer.state_dict()      {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}
here                        state of "blocks.0.norm.weight": {"exp_avg": ...}; groups of names
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.checkpoints.manifest import GroupEntry, OptimizerEntry
from penstock.errors import CheckpointError

OF_THE_MACHINE = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a group that say how it computes, which another device may do otherwise."""
MAIN_WEIGHT = "main_weight"
"""Under which name the state of a parameter has its main weight, also before its first step."""
STEP = "step"
"""Under which name torch's optimizers count the steps of a parameter, in a plain tensor without dimensions."""
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerContent:
    """The state of one rank's optimizer."""

    name: str
    groups: list[GroupEntry]
    tensors: dict[str, dict[str, Tensor]]
    """By name of a parameter."""
    values: dict[str, dict[str, Any]]
    """All that is no tensor, by name of a parameter."""


NO_OPTIMIZER = OptimizerContent("", [], {}, {})


def optimizer_content(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerContent:
    """Read an optimizer; `names` are those of the pipeline's parameters, by id.

    Raises:
        CheckpointError: a parameter is none of the pipeline's; a value can be saved neither as a tensor nor as JSON.
    """
    state = optimizer.state_dict()
    order = [_name_of(parameter, names) for parameter in _parameters(optimizer)]
    content = OptimizerContent(_class_of(optimizer), [], {}, {})
    for group in state["param_groups"]:
        own = [order[number] for number in group["params"]]
        options = {key: _plain(value, key) for key, value in group.items() if key not in OF_THE_MACHINE}
        content.groups.append(GroupEntry(options=options, parameters=own))
    for number, kept in state["state"].items():
        if not isinstance(number, int):
            problem = f"{content.name} keeps state of {number!r}, which is no parameter, and is not saved"
            raise CheckpointError(problem)
        name = order[number]
        tensors = {key: value.detach() for key, value in kept.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in kept.items() if key not in tensors}
        content.tensors[name] = tensors
        content.values[name] = {key: _plain(value, f"{name}: {key}") for key, value in values.items()}
    return content


def merged_groups(of_ranks: Sequence[Sequence[Mapping[str, Any]]], owned: Sequence[frozenset[str]]) -> list[GroupEntry]:
    """Return the groups of all ranks as one optimizer's: those of equal options are one."""
    merged: list[GroupEntry] = []
    for groups, own in zip(of_ranks, owned, strict=True):
        for group in map(GroupEntry.model_validate, groups):
            place = next((known for known in merged if known.options == group.options), None)
            if place is None:
                place = GroupEntry(options=group.options, parameters=[])
                merged.append(place)
            place.parameters += [name for name in group.parameters if name in own]
    return merged


def require_loadable(
    optimizer: Optimizer, saved: OptimizerEntry | None, names: Mapping[int, str], where: object
) -> None:
    """Make sure that a checkpoint has all that an optimizer needs of it; `names` are those in the checkpoint.

    Raises:
        CheckpointError: saved without an optimizer, or with another class; a parameter or a moment of one is missing.
    """
    if saved is None:
        raise CheckpointError(f"{where}: was saved without an optimizer; pass none to load the weights alone")
    if saved.name not in (_class_of(optimizer), type(optimizer).__name__):  # the latter in files of earlier versions
        raise CheckpointError(
            f"{where}: holds the state of {saved.name}, but the optimizer is {_class_of(optimizer)}; use the same "
            "class, or pass no optimizer to load the weights alone"
        )
    in_groups = {name for group in saved.groups for name in group.parameters}
    own = [_name_of(parameter, names) for parameter in _parameters(optimizer)]
    if missing := [name for name in own if name not in in_groups]:
        raise CheckpointError(
            f"{where}: {saved.name} held no parameter {missing[0]!r}; train the same parameters, or pass no optimizer"
        )
    _require_whole_groups(optimizer, saved, names, where)
    # Refuse state in which a parameter lacks some of what another of its group has. Adafactor has other tensors for
    # matrices than for vectors; one without any was never stepped.
    for group in saved.groups:
        states = {name: saved.state[name] for name in group.parameters if name in saved.state}
        keys = {name: {*state.tensors, *state.values} for name, state in states.items()}
        for name, kept in keys.items():
            lacking = set().union(*(other - kept for other in keys.values() if kept < other))
            if lacking and kept - {MAIN_WEIGHT}:
                raise CheckpointError(
                    f"{where}: the optimizer's state of {name!r} lacks {', '.join(sorted(lacking))}, which others have"
                )


def _require_whole_groups(optimizer: Optimizer, saved: OptimizerEntry, names: Mapping[int, str], where: object) -> None:
    """Make sure that the parameters of each group had the same options when saved. Raises: CheckpointError."""
    options_of = {name: group.options for group in saved.groups for name in group.parameters}
    for group in optimizer.param_groups:
        own = [_name_of(parameter, names) for parameter in group["params"]]
        if any(options_of[name] != options_of[own[0]] for name in own):
            raise CheckpointError(
                f"{where}: {own[0]!r} and another parameter of its group had different options when they were saved; "
                "make groups of the same parameters"
            )


def load_optimizer(
    optimizer: Optimizer, saved: OptimizerEntry, tensors: Mapping[str, Mapping[str, Tensor]], names: Mapping[int, str]
) -> None:
    """Put an optimizer where a checkpoint was; `tensors` has what it needs, by name of a parameter in the checkpoint.

    Options of groups are taken over, but for those of the machine. Raises: CheckpointError.
    """
    parameters = list(_parameters(optimizer))
    options_of = {name: group.options for group in saved.groups for name in group.parameters}
    state = optimizer.state_dict()
    order = [_name_of(parameter, names) for parameter in parameters]
    for group in state["param_groups"]:
        own = [options_of[order[number]] for number in group["params"]]
        for key, value in own[0].items() if own else ():
            group[key] = _like(value, group.get(key))
    loaded = {
        number: {**saved.state[name].values, **tensors[name]} for number, name in enumerate(order) if name in tensors
    }
    optimizer.load_state_dict({**state, "state": loaded})
    # torch casts what it loads to the type of the parameter, which may round it.
    for number, kept in loaded.items():
        state = optimizer.state[parameters[number]]
        for key, value in kept.items():
            are_tensors = isinstance(value, Tensor) and isinstance(state.get(key), Tensor)
            if are_tensors and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device, copy=True)


def _class_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, and of the one within it, such as that of main weights."""
    inner, name = getattr(optimizer, "inner", None), type(optimizer).__name__
    return f"{name}({type(inner).__name__})" if isinstance(inner, Optimizer) else name


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the pipeline's on this "
            "rank; make it from pipeline.parameters()"
        )
    return names[id(parameter)]


def _plain(value: Any, what: str) -> Any:
    """Return a value as JSON holds it. Raises: CheckpointError."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(item, what) for item in value]
    if isinstance(value, PLAIN):
        return value
    raise CheckpointError(
        f"{what}: {type(value).__name__} of the optimizer cannot be saved; expected tensors or numbers"
    )


def _like(value: Any, current: Any) -> Any:
    """Return a saved option as what the optimizer has in its place."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    if isinstance(value, list):
        return tuple(value)
    return value
