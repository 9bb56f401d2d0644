"""Uses of torch that its docs do not promise: tensors without values, and operations by their names.

A fake tensor has a shape, a type and a storage of its own, on the CPU, and no memory. Operations on it compute shapes.
Each use has a test of its own in tests/sizing/test_undocumented.py, so that a new torch that changes it fails there
first, and says which.
"""

from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FAKE_TENSORS: Any = attrgetter("_subclasses.fake_tensor")(torch)
_GROUPED = "aten::_grouped_mm"
_DEPENDS_ON_VALUES = (
    _FAKE_TENSORS.DataDependentOutputException,
    _FAKE_TENSORS.DynamicOutputShapeException,
)


class FakeTensors:
    """Makes the fake tensors of one count, which all compute with one another and with real ones."""

    def __init__(self) -> None:
        self._mode: Any = _FAKE_TENSORS.FakeTensorMode(allow_non_fake_inputs=True)

    def making(self) -> AbstractContextManager[Any]:
        """Return a context in which all new tensors are fake.

        Layers run outside of it, so that what they make of the batch, such as masks, has the values that they look at.
        """
        context: AbstractContextManager[Any] = self._mode
        return context


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, _FAKE_TENSORS.FakeTensor)


def depends_on_values(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that an operation needs the values of a fake tensor."""
    while error is not None:
        if isinstance(error, _DEPENDS_ON_VALUES):
            return True
        error = error.__cause__ or error.__context__
    return False


class Operation(NamedTuple):
    """One operation of torch as its dispatcher calls it."""

    name: str
    """Its name without its overload, such as `mm`."""
    namespace: str
    """`aten` for torch's own."""
    changes_arguments: bool
    """Whether it writes into a tensor that it is given."""


def operation_of(function: Any) -> Operation:
    """Return what is known of a function that `__torch_dispatch__` gets."""
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    return Operation(name, namespace, schema.is_mutable)


def named_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the operation's schema, those that are not given with defaults."""
    arguments = {item.name: item.default_value for item in function._schema.arguments if item.has_default_value()}
    names = [item.name for item in function._schema.arguments]
    return arguments | dict(zip(names, args, strict=False)) | kwargs


def run_operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; also a grouped product without values, which torch computes for bfloat16 alone."""
    if function._schema.name == _GROUPED and (is_fake(args[0]) or args[0].is_meta) and args[0].dtype != torch.bfloat16:
        arguments = named_arguments(function, args, kwargs)
        return args[0].new_empty(_grouped_shape(args[0], args[1], arguments["offs"]))
    return function(*args, **kwargs)


def _grouped_shape(left: Tensor, right: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """Return the shape of a grouped product; an operand of 2 dimensions is cut into groups by the offsets."""
    groups = (offsets.shape[0],) if left.dim() == right.dim() == 2 else ()
    if left.dim() == right.dim() == 3:
        groups = (left.shape[0],)
    return *groups, left.shape[-2], right.shape[-1]
