"""Where a module is cut: names and patterns of submodules, and what lies beside them.

Model(embedding, place, blocks.0, blocks.1, norm, head)   cut at "blocks.*"
begin      embedding, place      what is defined before the first point
points     blocks.0  blocks.1  norm  head                 what is defined behind it is a point too
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError, nearest
from penstock.models.cutting.undocumented import is_saved

KEY = "points"


@dataclass(frozen=True, slots=True)
class CutModel:
    """The names of what a module is cut into."""

    points: tuple[str, ...]
    """Submodules in the order of the forward; each begins a layer."""
    begin_modules: tuple[str, ...]
    """Submodules that run before the first point, and have parameters or saved buffers."""
    tensors: tuple[str, ...]
    """Parameters and saved buffers of the modules around the points, which belong to what runs before the first one."""

    @property
    def has_begin(self) -> bool:
        """Whether a layer of its own runs before the first point."""
        return bool(self.begin_modules or self.tensors)


def cut_model(model: nn.Module, patterns: Sequence[str]) -> CutModel:
    """Find the submodules at which a module is cut (its points), and what runs before the first of them.

    Submodules with parameters that are defined after the first point become points too. What is defined before it runs
    in a layer of its own, together with tensors that the modules around the points hold themselves.

    Raises:
        ConfigError: a pattern finds nothing, a submodule is named twice or lies in another one, or the points are out
            of order.
    """
    points = _matching_points(model, patterns)
    # Outer modules contain the points: their parents up to the model, and lists beside the points.
    outer_modules = {name.rpartition(".")[0] for name in points}
    outer_modules |= {path for name in outer_modules for path in _parents(name)} | {""}
    for name, module in model.named_modules():
        if name.rpartition(".")[0] in outer_modules and name not in points and _is_container(module):
            outer_modules.add(name)
    definition_order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    begin_modules: list[str] = []
    later_points: list[str] = []
    for name, module in model.named_modules():
        # Look at the submodules of outer modules that are neither outer modules nor points.
        if name in outer_modules or name in points or name.rpartition(".")[0] not in outer_modules:
            continue
        is_after_first_point = definition_order[name] > definition_order[points[0]]
        has_parameters = any(True for _ in module.parameters())
        if is_after_first_point and has_parameters:
            later_points.append(name)
        elif has_parameters or module.state_dict():
            begin_modules.append(name)
    tensors = [
        f"{path}.{name}" if path else name
        for path in sorted(outer_modules, key=definition_order.__getitem__)
        for name, _ in own_tensors(model.get_submodule(path))
    ]
    return CutModel(tuple(_merged(points, later_points, definition_order)), tuple(begin_modules), tuple(tensors))


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and saved buffers that a module holds itself."""
    # The state_dict() of a module would tell, but is refused where a pipeline has freed a part of it.
    buffers = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if is_saved(module, name)]
    return [*module.named_parameters(recurse=False), *buffers]


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a model by name, also of one of which a pipeline has freed a part."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module)
    }


def _matching_points(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the submodules that the patterns match, in the order of the patterns.

    A `*` stands for one part of a name, as in `layers.*`.

    Raises:
        ConfigError: a pattern matches nothing, points lie in each other, or a point is a list that has no forward.
    """
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"{patterns!r}; expected a list of names of submodules, such as ['layers.*']", key=KEY)
    points: list[str] = []
    for pattern in patterns:
        matching_names = names_like(pattern, names)
        if not matching_names:
            raise ConfigError(
                f"{pattern!r} names no submodule of {type(model).__name__}.{nearest(str(pattern), names)} Give names "
                "as named_modules() has them, or patterns, in which * stands for one part of a name",
                key=KEY,
            )
        points += matching_names
    _require_separate(points)
    for name in points:
        if _is_container(module := model.get_submodule(name)):
            raise ConfigError(
                f"{name!r} is a {type(module).__name__}, which has no forward, so that nothing calls it; give what is "
                f"in it, as by '{name}.*'",
                key=KEY,
            )
    return points


def names_like(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, in which `*` stands for one part of a name."""
    rule = re.compile(r"[^.]+".join(map(re.escape, str(pattern).split("*"))))
    return [name for name in names if rule.fullmatch(name)]


def _is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, or parameters, as `nn.ModuleList` does."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def _require_separate(points: Sequence[str]) -> None:
    """Refuse points that repeat, or lie in one another. Raises: ConfigError."""
    for index, name in enumerate(points):
        if name in points[:index]:
            raise ConfigError(f"{name!r} is named twice; a point is where one layer begins", key=KEY)
        if containers := [point for point in points if name.startswith(f"{point}.")]:
            raise ConfigError(f"{name!r} lies in {containers[0]!r}; cut at one of them", key=KEY)


def _parents(name: str) -> Iterable[str]:
    steps = name.split(".")
    return (".".join(steps[:length]) for length in range(len(steps)))


def _merged(points: Sequence[str], later: Sequence[str], definition_order: dict[str, int]) -> list[str]:
    """Put submodules between the points by where they are defined; the points stay in their order."""
    merged = list(points)
    for name in later:
        indices_before = [
            index for index, point in enumerate(merged) if definition_order[point] < definition_order[name]
        ]
        merged.insert(indices_before[-1] + 1, name)
    return merged


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of a full name."""
    path, _, tensor_name = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), tensor_name)
    return tensor


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of a full name."""
    path, _, tensor_name = name.rpartition(".")
    setattr(model.get_submodule(path), tensor_name, tensor)


def first_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split the arguments of a point into the first one, by position or keyword, and the further ones of both kinds.

    Raises:
        PenstockError: there is none.
    """
    if args:
        return args[0], args[1:], kwargs
    if not kwargs:
        raise PenstockError(f"a {type(module).__name__} is called without arguments; a point takes what came before it")
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
