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
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"}


class Missing(TorchFunctionMode):
    """Notes, while it is entered, which tensors lack values."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, UntypedStorage] = {}

    def mark(self, value: Any) -> None:
        """Note that the tensors of a tree have no values."""
        for tensor in tensors_in(value):
            storage = _storage_of(tensor)
            if storage is not None:
                self._storages[storage.data_ptr()] = storage  # kept, so that no other tensor gets this memory

    def has(self, value: Any) -> bool:
        """Whether a tensor of a tree lacks values."""
        return any(self._has(tensor) for tensor in tensors_in(value))

    def _has(self, tensor: Tensor) -> bool:
        storage = _storage_of(tensor)
        if storage is not None and storage.data_ptr() in self._storages:
            return True
        if tensor.is_meta or not is_bare(tensor):
            return False
        return bool(tensor[(slice(1),) * tensor.dim()].isnan().any())

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
        lacks = name not in SHAPES and self.has((args, kwargs))
        if lacks and name in READS:
            raise PenstockError(
                f"the forward decides by the value of a tensor that a layer of another stage computes ({name}); all "
                "that it decides by must follow from the batch"
            )
        output = func(*args, **kwargs)
        if lacks:
            self.mark((output, kwargs.get("out")))
            if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
                self.mark(args[:1])
        return output


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory of a tensor; None where it has none, as a sparse one or one on the meta device."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except RuntimeError:
        return None
