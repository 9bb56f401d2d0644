"""A whole model, cut into parts by the names of its modules; a part keeps the names of the whole model.

A module that a part lacks is None, as torchtitan's models expect of themselves:

    hidden = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
    for layer in self.layers.values():
        hidden = layer(hidden)

Lists and dicts of modules stay, also where a part has nothing of them: an entry of an `nn.ModuleDict` is dropped, one
of an `nn.ModuleList` or of a divided `nn.Sequential` becomes an `Absent`, which returns its first argument, so that
the entries left keep their numbers.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.errors import PartitionError, nearest

_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


class Absent(nn.Module):
    """Stands in a list for a layer of another part."""

    def forward(self, hidden: Any, *further_inputs: Any, **keywords: Any) -> Any:
        return hidden


class ModelParts:
    """The parts of a model: `names_per_part[stage]` are the modules of a stage, as in `named_modules`.

    A module may be in several parts. Parameters of the model itself, or of a module that is divided, are in every part
    that has some of it.

    Raises:
        PartitionError: an unknown name, a part without names, or parameters that no part has.
    """

    def __init__(self, model: nn.Module, names_per_part: Sequence[Sequence[str]]) -> None:
        self._model = model
        self._names = [tuple(names) for names in names_per_part]
        self._check()

    @property
    def num_stages(self) -> int:
        return len(self._names)

    def make(self, stage: int) -> nn.Module:
        """Return a copy of the model without the modules that only other parts have; these are not even copied."""
        names = self._names[stage]
        kept_ids = {
            id(module)
            for name, module in _modules(self._model)
            if self._is_needed(name, names) or isinstance(module, _CONTAINERS)
        }
        # deepcopy takes the copy of an object from its memo, if that has one: modules of other parts become Absent.
        memo: dict[int, Any] = {
            id(module): Absent() for _, module in _modules(self._model) if id(module) not in kept_ids
        }
        part = copy.deepcopy(self._model, memo)
        self._prune(part, "", names)
        return part

    def tied(self) -> list[tuple[str, str]]:
        """Return pairs of parameter names `stage.name` that mean one parameter: its first name, and another one."""
        owner_names: dict[int, str] = {}
        pairs = []
        for stage, names in enumerate(self._names):
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                if self._is_needed(name.rpartition(".")[0], names):
                    stage_name = f"{stage}.{name}"
                    owner_name = owner_names.setdefault(id(parameter), stage_name)
                    pairs += [(owner_name, stage_name)] if owner_name != stage_name else []
        return pairs

    def _check(self) -> None:
        module_names = [name for name, _ in _modules(self._model) if name]
        for stage, names in enumerate(self._names):
            if not names:
                raise PartitionError(f"part {stage} names no module; give it one, or use fewer parts")
            for name in names:
                if name not in module_names:
                    raise PartitionError(
                        f"part {stage}: the model has no module {name!r}.{nearest(name, module_names)}"
                    )
        for name, _ in self._model.named_parameters():
            owner = name.rpartition(".")[0]
            if not any(self._is_needed(owner, names) for names in self._names):
                raise PartitionError(f"no part has the parameter {name!r}; name its module in one of them")

    def _is_inside(self, name: str, names: Sequence[str]) -> bool:
        """Whether a module is one of the names, or below one."""
        return any(name == part_name or name.startswith(f"{part_name}.") for part_name in names)

    def _is_needed(self, name: str, names: Sequence[str]) -> bool:
        """Whether a module is one of the names, or below or above one; the model itself is always needed."""
        return not name or self._is_inside(name, names) or any(part_name.startswith(f"{name}.") for part_name in names)

    def _prune(self, module: nn.Module, prefix: str, names: Sequence[str]) -> None:
        """Remove the children of a module that a part of these names does not need; `prefix` is the module's name."""
        children = [(child, value) for child, value in _modules(module) if child and "." not in child]
        for child, value in children:
            name = f"{prefix}{child}"
            if self._is_inside(name, names):
                continue
            if self._is_needed(name, names) or isinstance(value, _CONTAINERS):
                self._prune(value, f"{name}.", names)
            elif isinstance(module, nn.ModuleDict):
                del module[child]
            elif isinstance(module, (nn.ModuleList, nn.Sequential)):
                module[int(child)] = Absent()
            else:
                setattr(module, child, None)


def _modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules with their names; a module with several names is listed under each of them."""
    return list(module.named_modules(remove_duplicate=False))
