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
"""Options of a group that say how it computes, which differs from device to device, and are thus not saved."""
MAIN_WEIGHT = "main_weight"
"""The name under which the state of a parameter has its main weight, also before its first step."""
STEP = "step"
"""The name under which torch's optimizers count the steps of a parameter, in a plain tensor without dimensions."""
PLAIN = (bool, int, float, str, type(None))
"""The types that JSON keeps as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerContent:
    """The state of one rank's optimizer."""

    name: str
    groups: list[GroupEntry]
    tensors: dict[str, dict[str, Tensor]]
    """The tensors that it keeps, by name of a parameter, then by the optimizer's name."""
    values: dict[str, dict[str, Any]]
    """The values that are no tensors, by name of a parameter, then by the optimizer's name."""


NO_OPTIMIZER = OptimizerContent("", [], {}, {})


def optimizer_content(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerContent:
    """Return an optimizer's state by name of a parameter; `names` has those of the pipeline's parameters, by id.

    Raises:
        CheckpointError: a parameter is none of the pipeline's; a value can be saved neither as a tensor nor as JSON.
    """
    state = optimizer.state_dict()
    names_by_number = [_name_of(parameter, names) for parameter in _parameters(optimizer)]
    content = OptimizerContent(_class_of(optimizer), [], {}, {})
    for group in state["param_groups"]:
        parameter_names = [names_by_number[number] for number in group["params"]]
        options = {key: _plain(value, key) for key, value in group.items() if key not in OF_THE_MACHINE}
        content.groups.append(GroupEntry(options=options, parameters=parameter_names))
    for number, parameter_state in state["state"].items():
        if not isinstance(number, int):
            problem = f"{content.name} keeps state of {number!r}, which is no parameter, and is not saved"
            raise CheckpointError(problem)
        name = names_by_number[number]
        tensors = {key: value.detach() for key, value in parameter_state.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in parameter_state.items() if key not in tensors}
        content.tensors[name] = tensors
        content.values[name] = {key: _plain(value, f"{name}: {key}") for key, value in values.items()}
    return content


def merged_groups(
    groups_by_rank: Sequence[Sequence[Mapping[str, Any]]], names_by_rank: Sequence[frozenset[str]]
) -> list[GroupEntry]:
    """Return the groups of all ranks as one optimizer's: groups of equal options become one.

    A parameter that several ranks hold is listed once: `names_by_rank` has the names that each rank saves.
    """
    merged: list[GroupEntry] = []
    for groups, rank_names in zip(groups_by_rank, names_by_rank, strict=True):
        for group in map(GroupEntry.model_validate, groups):
            merged_group = next((candidate for candidate in merged if candidate.options == group.options), None)
            if merged_group is None:
                merged_group = GroupEntry(options=group.options, parameters=[])
                merged.append(merged_group)
            merged_group.parameters += [name for name in group.parameters if name in rank_names]
    return merged


def require_loadable(
    optimizer: Optimizer, entry: OptimizerEntry | None, names: Mapping[int, str], source: object
) -> None:
    """Refuse a checkpoint that lacks something that an optimizer needs; `names` are those in it, by id of a parameter.

    Raises:
        CheckpointError: saved without an optimizer, or with another class; a parameter or a moment of one is missing.
    """
    if entry is None:
        raise CheckpointError(f"{source}: was saved without an optimizer; pass none to load the weights alone")
    if entry.name not in (_class_of(optimizer), type(optimizer).__name__):  # the latter in files of earlier versions
        raise CheckpointError(
            f"{source}: holds the state of {entry.name}, but the optimizer is {_class_of(optimizer)}; use the same "
            "class, or pass no optimizer to load the weights alone"
        )
    in_groups = {name for group in entry.groups for name in group.parameters}
    local_names = [_name_of(parameter, names) for parameter in _parameters(optimizer)]
    if missing := [name for name in local_names if name not in in_groups]:
        raise CheckpointError(
            f"{source}: {entry.name} held no parameter {missing[0]!r}; train the same parameters, or pass no optimizer"
        )
    _require_whole_groups(optimizer, entry, names, source)
    _require_whole_state(entry, source)


def _require_whole_state(entry: OptimizerEntry, source: object) -> None:
    """Refuse state in which a parameter lacks some of what another of its group has. Raises: CheckpointError."""
    # "Lacks" means a proper subset: Adafactor keeps other tensors for matrices than for vectors, which are no subset of
    # each other. A parameter without state, or with a main weight alone, was never stepped.
    for group in entry.groups:
        states = {name: entry.state[name] for name in group.parameters if name in entry.state}
        keys_by_name = {name: {*state.tensors, *state.values} for name, state in states.items()}
        for name, keys in keys_by_name.items():
            lacking = set().union(*(other_keys - keys for other_keys in keys_by_name.values() if keys < other_keys))
            if lacking and keys - {MAIN_WEIGHT}:
                raise CheckpointError(
                    f"{source}: the optimizer's state of {name!r} lacks {', '.join(sorted(lacking))}, which others have"
                )


def _require_whole_groups(
    optimizer: Optimizer, entry: OptimizerEntry, names: Mapping[int, str], source: object
) -> None:
    """Make sure that the parameters of each group had the same options when saved. Raises: CheckpointError."""
    options_of = {name: group.options for group in entry.groups for name in group.parameters}
    for group in optimizer.param_groups:
        group_names = [_name_of(parameter, names) for parameter in group["params"]]
        if any(options_of[name] != options_of[group_names[0]] for name in group_names):
            raise CheckpointError(
                f"{source}: {group_names[0]!r} and another parameter of its group had different options when they were "
                "saved; make groups of the same parameters"
            )


def load_optimizer(
    optimizer: Optimizer, entry: OptimizerEntry, tensors: Mapping[str, Mapping[str, Tensor]], names: Mapping[int, str]
) -> None:
    """Load the state and options of a checkpoint into an optimizer, which may have other groups than the saved one.

    `entry` has, by name of a parameter, the values of its state that are no tensors; `tensors` has those that are.
    `names` has the parameter's name in the checkpoint by its id. Options that say how this machine computes (fused,
    foreach) stay as they are.

    Raises:
        CheckpointError: the optimizer has a parameter that is none of the pipeline's.
    """
    parameters = list(_parameters(optimizer))
    options_by_name = {name: group.options for group in entry.groups for name in group.parameters}
    state = optimizer.state_dict()
    names_by_number = [_name_of(parameter, names) for parameter in parameters]
    for group in state["param_groups"]:
        # All parameters of a group have the same options, which `require_loadable` has made sure of.
        saved_options = options_by_name[names_by_number[group["params"][0]]] if group["params"] else {}
        for key, value in saved_options.items():
            group[key] = _value_like(value, group.get(key))
    loaded_state = {
        number: {**entry.state[name].values, **tensors[name]}
        for number, name in enumerate(names_by_number)
        if name in tensors
    }
    optimizer.load_state_dict({**state, "state": loaded_state})
    # `load_state_dict` casts tensors to the type of the parameter, which may round them: put them back in their own
    # type.
    for number, parameter_state in loaded_state.items():
        state = optimizer.state[parameters[number]]
        for key, value in parameter_state.items():
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


def _plain(value: Any, label: str) -> Any:
    """Return a value of an optimizer as JSON holds it; messages call it `label`. Raises: CheckpointError."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(item, label) for item in value]
    if isinstance(value, PLAIN):
        return value
    raise CheckpointError(
        f"{label}: {type(value).__name__} of the optimizer cannot be saved; expected tensors or numbers"
    )


def _value_like(value: Any, current: Any) -> Any:
    """Return a saved option as the type of the current one: a tensor where that is one, a tuple for a list of JSON."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    if isinstance(value, list):
        return tuple(value)
    return value
