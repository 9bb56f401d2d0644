"""Finds what is computed from values that are not there, also where it has none that could be NaN: masks, numbers.

    stand-in ──► hidden ──► hidden.sum(-1) > 0 ──► mask     lacks values, though every one of them is False
                        └─► torch.zeros_like(hidden)        does not

Values are followed by the memory they lie in, so that views and changes in place are followed too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

from penstock.errors import PenstockError
from penstock.models.cutting.placeholders import is_bare, tensors_in

SHAPES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"),
}
"""Functions that take shape, type and device of a tensor alone."""
READS = {
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "item", "tolist"),
    *("numpy", "equal", "allclose", "is_nonzero"),
}
"""Functions that make a Python value of a tensor, by which a forward may go on in another way."""
UNKNOWN = "a submodule before it"
"""Stands for the origin of values that were made before they were followed."""
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"}


class Missing(TorchFunctionMode):
    """Notes, while it is entered, which tensors lack values."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[UntypedStorage, str]] = {}

    def mark(self, value: Any, origin: str) -> None:
        """Note that the tensors of a tree have no values, which the submodule or parameter `origin` would give them."""
        for tensor in tensors_in(value):
            storage = _storage_of(tensor)
            if storage is not None:
                self._storages[storage.data_ptr()] = storage, origin  # kept, so that no other tensor gets this memory

    def origin_of(self, value: Any) -> str | None:
        """Return what would give a value to the first tensor of a tree that lacks it; None where all have theirs."""
        return next((name for tensor in tensors_in(value) if (name := self._origin_of(tensor)) is not None), None)

    def _origin_of(self, tensor: Tensor) -> str | None:
        storage = _storage_of(tensor)
        if storage is not None and storage.data_ptr() in self._storages:
            return self._storages[storage.data_ptr()][1]
        if tensor.is_meta or not is_bare(tensor):
            return None
        return UNKNOWN if tensor[(slice(1),) * tensor.dim()].isnan().any() else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave operators alone inside, where the mode is entered."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        origin = None if name in SHAPES else self.origin_of((args, kwargs))
        if origin is not None and name in READS:
            raise PenstockError(
                f"the forward decides by the value of a tensor that a layer of another stage computes ({name}), "
                f"{origin!r}; all that it decides by must follow from the batch"
            )
        output = func(*args, **kwargs)
        if origin is not None:
            self.mark((output, kwargs.get("out")), origin)
            if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
                self.mark(args[:1], origin)
        return output


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory of a tensor; None where it has none, as a sparse one or one on the meta device."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except RuntimeError:
        return None
