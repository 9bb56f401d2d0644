"""`Ledger`: what autograd keeps of the forwards of each stage, from when it saves a tensor until it lets go of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import flatten


class Ledger:
    """Counts the storages that forwards have left for their backwards; `but` are there anyway."""

    def __init__(self, but: Iterable[Tensor], note: Callable[[Tensor], None]) -> None:
        """`note` gets each tensor whose storage is new to a stage."""
        self._but = {local_part(tensor).untyped_storage().data_ptr() for tensor in but}
        self._entries: dict[int, dict[int, _Entry]] = {}
        self._stage = 0
        self._note = note

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Note what a forward of a stage, run in this thread meanwhile, leaves behind."""
        self._stage = stage
        with saved_tensors_hooks(self._save, _unwrapped):
            yield

    def held(self, stage: int) -> Mapping[int, int]:
        """Return the bytes of each storage, by its address, that is kept for backwards of a stage."""
        return {address: entry.num_bytes for address, entry in self._entries.get(stage, {}).items()}

    def _save(self, tensor: Tensor) -> Any:
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() in self._but:
            return tensor
        entries = self._entries.setdefault(self._stage, {})
        if storage.data_ptr() not in entries:
            entries[storage.data_ptr()] = _Entry(storage.nbytes())
            self._note(tensor)
        entry = entries[storage.data_ptr()]
        # An output that its own node saves would keep the node, and so itself, alive where no backward comes by.
        return _Held(tensor.detach(), entries, storage.data_ptr(), entry)


class _Entry:
    __slots__ = ("num_bytes", "num_uses")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_uses = 0


class _Held:
    """A tensor in autograd's hands; when autograd drops it, the ledger knows."""

    __slots__ = ("_address", "_entries", "_entry", "tensor")

    def __init__(self, tensor: Tensor, entries: dict[int, _Entry], address: int, entry: _Entry) -> None:
        self.tensor = tensor
        self._entries = entries
        self._address = address
        self._entry = entry
        entry.num_uses += 1

    def __del__(self) -> None:
        self._entry.num_uses -= 1
        if not self._entry.num_uses:
            self._entries.pop(self._address, None)


def storages(tree: Any) -> dict[int, int]:
    """Return the bytes of each storage, by its address, that holds a tensor of a tree."""
    found = (local_part(leaf).untyped_storage() for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def _unwrapped(saved: Any) -> Tensor:
    return saved.tensor if isinstance(saved, _Held) else saved
