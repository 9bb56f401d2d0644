"""What submodules of other stages would return: shapes, types and graphs, found by running them without values."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.arguments import UnchangedArguments
from penstock.models.cutting.part_state import PartState, has_part_state
from penstock.models.cutting.state import fingerprint
from penstock.models.cutting.trees import map_items, map_tensors, tensors_in
from penstock.models.skip import Skip

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
DELETED = object()
"""Stands for an attribute that the forward has deleted."""


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    return copy.deepcopy(module, memo)


def without_values(tensor: Tensor, *, requires_grad: bool | None = None) -> Tensor:
    """Return a tensor on the meta device like this one, by default with a graph where this one needs a gradient."""
    if tensor.layout is not torch.strided:
        return tensor.detach().to("meta")
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if tensor.requires_grad if requires_grad is None else requires_grad:
        return bare.requires_grad_().clone()  # a result of a computation, which is no leaf of a graph
    return bare


class Placeholder:
    """Says what a method of a module would return, by running it without values: once for inputs of one kind."""

    def __init__(self, name: str, owner: nn.Module, module: nn.Module | None = None, *, is_point: bool = False) -> None:
        """`owner` is the module; `module` is a copy of it on the meta device, made where there is none."""
        self.name, self.owner, self._is_point = name, owner, is_point
        self.module = on_meta(owner) if module is None else module
        self._owner_parameters = list(owner.parameters())
        self._lock = threading.RLock()
        self._outputs_by_kind: dict[Any, tuple[Any, list[int | None]]] = {}
        self._failing_kinds: set[Any] = set()
        """The kinds of inputs with which the module cannot run on the meta device."""
        self._written: dict[str, Any] = {}
        """The kinds of the attributes that the forward has set."""
        self._like_first: dict[Any, bool] = {}
        """The kinds of inputs of which such a module has returned what is like the first one, and if with a graph."""
        self._has_skips = any(isinstance(child, Skip) for child in self.module.modules())

    def output(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> Any:
        """Return a tree of new tensors on the meta device, and of those that the module returns as it was given them.

        Raises:
            PenstockError: it cannot be found without values, or the module changes its further arguments.
        """
        tensors = tensors_in((args, kwargs))
        needs_gradients = tuple([parameter.requires_grad for parameter in self._owner_parameters])
        # Masks beside a state become longer with every token, while a block returns what is like its first argument.
        has_state = has_part_state((args, kwargs))
        kind: Any = (
            *(method, is_training, torch.is_grad_enabled(), needs_gradients, tuple(self._written.items())),
            *((_kind_of(_first(args, kwargs)),) if has_state else (_kind_of(args), _kind_of(kwargs))),
        )
        if kind in self._like_first:
            return without_values(_first(args, kwargs), requires_grad=self._like_first[kind])
        if kind in self._failing_kinds:
            kind = (*kind, _values_of(tensors))
        with self._lock:  # threads that run stages side by side share the module, which has one mode
            # Each output may depend on what was put into a skip, or is in a state.
            if kind not in self._outputs_by_kind or self._has_skips or has_state:
                for parameter, needs_gradient in zip(self.module.parameters(), needs_gradients, strict=False):
                    parameter.requires_grad_(needs_gradient)
                self.module.train(is_training)
                output, inputs, kind = self._find(method, tensors, args, kwargs, kind)
                index_by_id = {id(tensor): index for index, tensor in enumerate(inputs)}
                self._outputs_by_kind[kind] = output, [index_by_id.get(id(tensor)) for tensor in tensors_in(output)]
                if has_state and self._is_point and _are_alike(output, _first(args, kwargs)):
                    self._like_first[kind] = output.requires_grad
            output, input_indices = self._outputs_by_kind[kind]
        # Of each tensor of the output: the index of the input that it is, or None.
        next_index = iter(input_indices)
        return map_tensors(
            lambda tensor: without_values(tensor) if (index := next(next_index)) is None else tensors[index], output
        )

    def write(self, name: str, value: Any) -> None:
        """Set an attribute as the forward does, or delete it where the value is `DELETED`."""
        self._written[name] = _kind_of(value)
        if value is not DELETED:
            setattr(self.module, name, map_tensors(without_values, value))
        elif hasattr(self.module, name):
            delattr(self.module, name)

    def _find(
        self, method: str, tensors: list[Tensor], args: Any, kwargs: Any, kind: Any
    ) -> tuple[Any, list[Tensor], Any]:
        """Return what the module returns, the inputs that it was given, and the kind of inputs for which that holds."""
        if kind[:-1] not in self._failing_kinds:
            inputs = [without_values(tensor) for tensor in tensors]
            try:
                return self._run(self.module, method, inputs, args, kwargs), inputs, kind
            except PenstockError:
                raise
            except Exception:  # a module that decides by values, as experts do
                self._failing_kinds.add(kind)
                kind = (*kind, _values_of(tensors))
        inputs = [_zeros(tensor) for tensor in tensors]
        first = _first(args, kwargs)
        is_block = self._is_point and isinstance(first, Tensor)
        try:
            output = self._run(self._on_zeros(), method, inputs, args, kwargs)
            if is_block and _are_alike(output, first):
                self._like_first[kind[:-1]] = output.requires_grad
            return output, inputs, kind
        except PenstockError:
            raise
        except Exception as error:
            if is_block:
                # Most blocks return what is like their input; if this one does not, its stage refuses it.
                self._like_first[kind[:-1]] = first.requires_grad
                return without_values(first), [], kind
            raise PenstockError(
                f"what {self.name!r} returns cannot be found without values ({type(error).__name__}: {error}); its "
                "shape must follow from the shapes of its inputs"
            ) from error

    def _on_zeros(self) -> nn.Module:
        """Return a copy of the module on the CPU whose tensors are zeros; the system has no memory of large ones."""
        memo: dict[int, Any] = {}
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
            memo[id(tensor)] = nn.Parameter(zeros, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros
        return copy.deepcopy(self.module, memo)

    def _run(self, module: nn.Module, method: str, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        next_input = iter(inputs)
        method_of_module: Callable[..., Any] = module if method == "__call__" else getattr(module, method)
        call_args, call_kwargs = map_items(
            lambda item: next(next_input) if isinstance(item, Tensor) else _copied(item), (args, kwargs)
        )
        unchanged = UnchangedArguments(self.name, call_args, call_kwargs)
        with torch.random.fork_rng(devices=[]):  # what a stand-in draws is drawn by no part
            output = method_of_module(*call_args, **call_kwargs)
        unchanged.require(method_of_module)
        return output


def _kind_of(value: Any) -> Any:
    """Return what of an argument the shapes of an output depend on: all but the values of tensors."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided
        return tuple(value.shape), value.dtype, value.requires_grad, value.stride() if is_dense else value.layout
    if isinstance(value, tuple | list):
        return type(value), tuple([_kind_of(item) for item in value])
    if type(value) is dict:
        return tuple([(key, _kind_of(item)) for key, item in value.items()])
    if isinstance(value, CONSTANTS):
        return type(value), value
    return type(value), tuple([_kind_of(item) for item in tensors_in(value)]), fingerprint(value)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


def _are_alike(output: Any, first: Any) -> bool:
    """Whether an output is one tensor of the shape and type of the first argument."""
    are_tensors = isinstance(output, Tensor) and isinstance(first, Tensor)
    return are_tensors and (output.shape, output.dtype) == (first.shape, first.dtype)


def _values_of(tensors: list[Tensor]) -> Any:
    """Return the values of the integers among some tensors."""
    integers = [tensor for tensor in tensors if not (tensor.is_meta or tensor.is_floating_point())]
    return tuple([tensor.detach().cpu().numpy().tobytes() for tensor in integers])


def _zeros(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return tensor.detach().cpu()


def _copied(item: Any) -> Any:
    """Return a copy of an object that a module may change; what cannot be copied, and modules, as they are."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, PartState):
        return item.without_values()
    if isinstance(item, (*CONSTANTS, nn.Module)) or callable(item):
        return item
    try:
        return copy.deepcopy(item)
    except Exception:
        return item


def copied(value: Any) -> Any:
    """Return a tree with copies of its tensors and objects."""
    return map_items(_copied, value)
