"""`Trace`: what the operations on tensors without values do while a layer runs: products and bytes moved.

Operations on real tensors, such as those that make masks of the batch, are no work: a model makes such tensors once for
all layers of a stage.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.cutting.undocumented import KernelMode, storage_key, storage_of
from penstock.simulation.costs.layer_work import PassWork, Product
from penstock.sizing.products import FORMULAS, products_of
from penstock.sizing.undocumented import Operation, is_fake, named_arguments, operation_of, run_operation

_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss_backward"})
"""Operations that read as many bytes as they write, however large the table is that they pick from."""
_WITHOUT_VALUES = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Operations that make memory and write nothing."""


class Trace(KernelMode):  # type: ignore[misc]
    """Everything that runs on this thread within it, part by part."""

    def __init__(self, counts: Callable[[Tensor], bool] = is_fake) -> None:
        """`counts` says which tensors' operations are counted."""
        super().__init__()
        self.kind: list[Hashable] = []
        """The operations, with the whole numbers that they are given, and the shapes and storages of tensors."""
        self._number_by_key: dict[int | None, int] = {}
        """The number of each storage in `kind`, by the storage's key."""
        self._numbers = count()
        self._counts = counts
        self._work = _Counted()

    @contextmanager
    def part(self) -> Iterator["_Counted"]:
        """Count what runs in here by itself."""
        work, earlier_work = _Counted(), self._work
        self._work = work
        try:
            yield work
        finally:
            self._work = earlier_work

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(_tensors_in((*args, *kwargs.values())))
        operation = operation_of(function)
        if operation.name == "embedding":
            _require_in_table(*inputs[:2])
        results = run_operation(function, args, kwargs)
        outputs = list(_tensors_in((results,)))
        input_keys = {key for tensor in inputs if (key := _key_of(tensor)) is not None}
        fresh_outputs = [tensor for tensor in outputs if _key_of(tensor) not in (None, *input_keys)]
        for tensor in fresh_outputs:  # a storage that is gone may have had this key
            self._number_by_key.pop(_key_of(tensor), None)
        if any(map(self._counts, (*inputs, *outputs))):
            self.kind.append((operation.name, *map(self._shown, (*args, *kwargs.values(), *fresh_outputs))))
            if fresh_outputs or operation.changes_arguments:
                self._work.add(operation, lambda: named_arguments(function, args, kwargs), inputs, outputs)
        return results

    def _shown(self, value: Any) -> Hashable:
        """Return what an argument means for the work: whole numbers, and a tensor's shape, type and storage.

        Storages are numbered as they come: f(x) + f(x) and x + f(x) call the same operations, and keep other tensors.
        """
        if isinstance(value, Tensor):
            key = _key_of(value)
            if key not in self._number_by_key:
                self._number_by_key[key] = next(self._numbers)
            return (tuple(value.shape), value.dtype, self._number_by_key[key])
        if isinstance(value, list | tuple):
            return tuple(map(self._shown, value))
        return None if isinstance(value, float) else str(value)


class _Counted:
    """The work of one part, as it is counted."""

    def __init__(self) -> None:
        self._products: list[Product] = []
        self._moved_bytes = self._num_kernels = 0
        self._unknown: dict[str, None] = {}

    def add(
        self,
        operation: Operation,
        arguments: Callable[[], dict[str, Any]],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Count one call of an operation."""
        if operation.name in _WITHOUT_VALUES:
            return
        self._num_kernels += 1
        products = products_of(operation, arguments() if operation.name in FORMULAS else {}, outputs)
        if products is None:
            self._unknown[f"{operation.namespace}::{operation.name}"] = None
        if products:
            self._products += products
            return
        read_tensors = outputs if operation.name in _LOOKUPS else inputs
        self._moved_bytes += sum(map(_bytes_of, (*read_tensors, *outputs)))

    def work(self) -> PassWork:
        """Return all that was counted."""
        return PassWork(
            products=tuple(self._products),
            moved_bytes=self._moved_bytes,
            num_kernels=self._num_kernels,
            unknown=tuple(self._unknown),
        )


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results: operations take and return lists of them, but no deeper trees."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _key_of(tensor: Tensor) -> int | None:
    """Return a number of the tensor's storage; None where it has none, as a sparse one."""
    storage = storage_of(tensor)
    return None if storage is None else storage_key(storage)


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are read or written; an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _require_in_table(table: Tensor, rows: Tensor) -> None:
    """Refuse rows beyond a table, which fake tensors would not notice. Raises: ConfigError."""
    if is_fake(rows) or not rows.numel() or rows.is_meta:
        return
    most = int(rows.max())
    if most >= table.shape[0]:
        raise ConfigError(
            f"a layer looks up row {most} of a table of {table.shape[0]} rows, as of positions beyond those that the "
            "model knows; expected a sequence of fewer tokens, or a model with more positions",
            key="sequence_length",
        )
