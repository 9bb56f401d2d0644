"""Where a module is cut: names and patterns of submodules, and what lies beside them.

Model(embedding, place, blocks.0, blocks.1, norm, head)   cut at "blocks.*"
begin      embedding, place      what is defined before the first point
points     blocks.0  blocks.1  norm  head                 what is defined behind it is a point too
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.errors import ConfigError, nearest
from penstock.models.cutting.undocumented import is_saved

KEY = "points"


@dataclass(frozen=True, slots=True)
class CutModel:
    """The names of what a module is cut into."""

    points: tuple[str, ...]
    """Submodules in the order of the forward; each begins a layer."""
    before: tuple[str, ...]
    """Submodules that run before the first point, and have parameters or saved buffers."""
    tensors: tuple[str, ...]
    """Parameters and saved buffers of the modules around the points, which belong to what runs before the first one."""

    @property
    def has_begin(self) -> bool:
        """Whether a layer of its own runs before the first point."""
        return bool(self.before or self.tensors)


def cut_model(model: nn.Module, patterns: Sequence[str]) -> CutModel:
    """Find the points of a module, and what lies before, between and behind them.

    Raises:
        ConfigError: a pattern finds nothing, a submodule is named twice or lies in another one, or the points are out
            of order.
    """
    points = _found(model, patterns)
    around = {name.rpartition(".")[0] for name in points}
    around |= {path for name in around for path in _parents(name)} | {""}
    for name, module in model.named_modules():
        if name.rpartition(".")[0] in around and name not in points and _is_container(module):
            around.add(name)
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    before: list[str] = []
    later: list[str] = []
    for name, module in model.named_modules():
        # Of the modules around the points: their submodules, but for these and the points.
        if name in around or name in points or name.rpartition(".")[0] not in around:
            continue
        is_behind = places[name] > places[points[0]]
        has_parameters = any(True for _ in module.parameters())
        if is_behind and has_parameters:
            later.append(name)
        elif has_parameters or module.state_dict():
            before.append(name)
    tensors = [
        f"{path}.{name}" if path else name
        for path in sorted(around, key=places.__getitem__)
        for name, _ in own_tensors(model.get_submodule(path))
    ]
    return CutModel(tuple(_merged(points, later, places)), tuple(before), tuple(tensors))


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


def _found(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"{patterns!r}; expected a list of names of submodules, such as ['layers.*']", key=KEY)
    found: list[str] = []
    for pattern in patterns:
        rule = re.compile(r"[^.]+".join(map(re.escape, str(pattern).split("*"))))
        here = [name for name in names if rule.fullmatch(name)]
        if not here:
            raise ConfigError(
                f"{pattern!r} names no submodule of {type(model).__name__}.{nearest(str(pattern), names)} Give names "
                "as named_modules() has them, or patterns, in which * stands for one part of a name",
                key=KEY,
            )
        found += here
    _require_apart(found)
    for name in found:
        if _is_container(module := model.get_submodule(name)):
            raise ConfigError(
                f"{name!r} is a {type(module).__name__}, which has no forward, so that nothing calls it; give what is "
                f"in it, as by '{name}.*'",
                key=KEY,
            )
    return found


def _is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, or parameters, as `nn.ModuleList` does."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def _require_apart(found: Sequence[str]) -> None:
    for index, name in enumerate(found):
        if name in found[:index]:
            raise ConfigError(f"{name!r} is named twice; a point is where one layer begins", key=KEY)
        if inside := [other for other in found if name.startswith(f"{other}.")]:
            raise ConfigError(f"{name!r} lies in {inside[0]!r}; cut at one of them", key=KEY)
    for one, other in itertools.pairwise(found):
        (parent, _, first), (same, _, second) = one.rpartition("."), other.rpartition(".")
        if parent == same and first.isdecimal() and second.isdecimal() and int(first) > int(second):
            raise ConfigError(f"{one!r} stands before {other!r}; give points in the order of the forward", key=KEY)


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def _merged(points: Sequence[str], later: Sequence[str], places: dict[str, int]) -> list[str]:
    """Put submodules between the points by where they are defined; the points stay in their order."""
    merged = list(points)
    for name in later:
        behind = [index for index, known in enumerate(merged) if places[known] < places[name]]
        merged.insert(behind[-1] + 1, name)
    return merged
