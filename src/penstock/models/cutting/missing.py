"""Finds what is computed from values that are not there, also where it has none that could be NaN: masks, numbers.

    stand-in ──► hidden ──► hidden.sum(-1) > 0 ──► mask     lacks values, though every one of them is False
                        └─► torch.zeros_like(hidden)        does not

Values are followed by the memory they lie in, so that views and changes in place are followed too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PenstockError
from penstock.models.cutting.placeholders import is_bare, lacks_values, tensors_in

_ATEN = torch.ops.aten
SHAPES = {
    getattr(_ATEN, name)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}
"""Operators that take shape, type and device of a tensor alone."""
READS = {_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.is_nonzero}
"""Operators that make a Python value of a tensor, by which a forward may go on in another way."""


class Missing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while it is entered, which tensors lack values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Any] = {}

    def mark(self, value: Any) -> None:
        """Note that the tensors of a tree have no values."""
        for tensor in tensors_in(value):
            storage = _storage_of(tensor)
            if storage is not None:
                self._storages[storage._cdata] = storage  # kept, so that no other tensor gets this memory

    def has(self, value: Any) -> bool:
        """Whether a tensor of a tree lacks values."""
        return any(self._has(tensor) for tensor in tensors_in(value))

    def _has(self, tensor: Tensor) -> bool:
        storage = _storage_of(tensor)
        if storage is not None and storage._cdata in self._storages:
            return True
        return not tensor.is_meta and is_bare(tensor) and lacks_values(tensor[(slice(1),) * tensor.dim()])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave operators alone inside, where the mode is entered."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lacks = func.overloadpacket not in SHAPES and self.has((args, kwargs))
        if lacks and func.overloadpacket in READS:
            raise PenstockError(
                "the forward decides by the value of a tensor that a layer of another stage computes "
                f"({func.overloadpacket.__name__}, as of bool() or .item()); all that it decides by must follow from "
                "the batch"
            )
        output = func(*args, **kwargs)
        if lacks:
            self.mark(output)
            if func._schema.is_mutable:
                self.mark(args[:1])
        return output


def _storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # as of sparse tensors
        return None
