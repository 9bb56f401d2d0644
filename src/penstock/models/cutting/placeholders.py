"""The results of stand-ins: tensors of the right shape and type whose values are not there.

They are NaN, so that whatever is computed from them by mistake is found. Such a tensor is one number, expanded.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.cutting.undocumented import version_of


def without_values(
    value: Any, device: torch.device, *, is_dense: bool = False, constants: Sequence[Tensor] = ()
) -> Any:
    """Return a tree like `value` on a device, its floating-point tensors without values; `constants` stay."""

    def blank(tensor: Tensor) -> Tensor:
        if any(tensor is constant for constant in constants):
            return tensor
        if not tensor.is_floating_point():
            return tensor if tensor.device == device else torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        nan = torch.full((), math.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
        return nan.clone() if is_dense else nan

    return map_tensors(blank, value)


def is_bare(value: Any) -> bool:
    """Whether a value is one tensor without values, as `without_values` makes it."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and not any(value.stride())


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tree of tuples, lists and dicts with `function` of each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, item)) for key, item in value.items())
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def versions_of(value: Any) -> tuple[int, ...]:
    """Return how often each tensor of a tree was changed in place."""
    return tuple(map(version_of, tensors_in(value)))


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if is_parameter else bare
    return copy.deepcopy(module, memo)


class Placeholder:
    """Says what a module would return, by running it on the meta device: once for inputs of one kind."""

    def __init__(self, module: nn.Module) -> None:
        """The module is on the meta device."""
        self.module = module
        self._outputs_by_kinds: dict[Any, Any] = {}
        self._kept_kinds: set[tuple[torch.Size, torch.dtype]] = set()

    def returns_kind_of(self, first: Any) -> bool:
        """Whether the module is known to return a tensor of the shape and type of its first argument."""
        return isinstance(first, Tensor) and (first.shape, first.dtype) in self._kept_kinds

    def note_kind(self, first: Any, returned: Any) -> None:
        """Note what the module returns for a first argument."""
        if isinstance(first, Tensor) and isinstance(returned, Tensor):
            kind = first.shape, first.dtype
            if kind == (returned.shape, returned.dtype):
                self._kept_kinds.add(kind)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a tree of tensors on the meta device, and of those that it was given and returns as they are.

        Raises: what the module raises there.
        """
        tensors = list(tensors_in((args, kwargs)))
        kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if kinds not in self._outputs_by_kinds:
            meta_tensors = [tensor.detach().to("meta") for tensor in tensors]
            index_by_id = {id(tensor): index for index, tensor in enumerate(meta_tensors)}
            next_input = iter(meta_tensors)
            inputs = map_tensors(lambda tensor: next(next_input), (args, kwargs))
            with torch.no_grad():
                output = self.module(*inputs[0], **inputs[1])
            self._outputs_by_kinds[kinds] = output, [index_by_id.get(id(tensor)) for tensor in tensors_in(output)]
        output, input_indices = self._outputs_by_kinds[kinds]
        # Of each tensor of the output: the index of the input that it is, or None.
        next_index = iter(input_indices)
        return map_tensors(lambda tensor: tensor if (index := next(next_index)) is None else tensors[index], output)
