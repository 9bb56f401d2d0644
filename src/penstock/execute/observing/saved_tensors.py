"""Counts bytes by storage: of what autograd keeps of the forwards of each stage, and of any tree of tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.execute.undocumented import repeats
from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import flatten


class SavedTensorTracker:
    """Counts the storages that forwards have left for their backwards, from when autograd saves them until it frees
    them; `but` are there anyway."""

    def __init__(self, but: Iterable[Tensor], note: Callable[[Tensor], object]) -> None:
        """`note` gets each tensor whose storage is new to a stage."""
        self._but = {local_part(tensor).untyped_storage().data_ptr() for tensor in but}
        self._entries: dict[int, dict[int, _Entry]] = {}
        self._note = note

    @contextmanager
    def of_stage(self, stage: int, attempt: Callable[..., Any]) -> Iterator[None]:
        """Track what a forward of a stage, run in this thread meanwhile, leaves behind.

        `attempt` makes the calls within the forward, and returns None where they fail.
        """
        entries = self._entries.setdefault(stage, {})

        def pack(tensor: Tensor) -> Any:
            held = attempt(self._save, entries, tensor)
            return tensor if held is None else held

        with saved_tensors_hooks(pack, _unwrapped):
            yield

    def held(self, stage: int) -> Mapping[int, int]:
        """Return the bytes of each storage, by its address, that is kept for backwards of a stage."""
        return {address: entry.num_bytes for address, entry in self._entries.get(stage, {}).items()}

    def _save(self, entries: "dict[int, _Entry]", tensor: Tensor) -> Any:
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() in self._but:
            return tensor
        if storage.data_ptr() not in entries:
            entries[storage.data_ptr()] = _Entry(storage.nbytes())
            self._note(tensor)
        entry = entries[storage.data_ptr()]
        # An output that its own node saves would keep the node, and so itself, alive where no backward runs.
        return _Held(tensor.detach(), entries, storage.data_ptr(), entry)


class _Entry:
    __slots__ = ("num_bytes", "num_uses")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_uses = 0


class _Held:
    """A tensor in autograd's hands; when autograd drops it, the tracker knows."""

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


class StorageCounter:
    """Adds up storages, each once; those at the addresses in `seen` not at all."""

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self._seen = set(seen)

    def add(self, tree: Any) -> int:
        """Return the bytes of the storages of a tree that had not been seen."""
        return self.add_storages(storages(tree))

    def add_storages(self, bytes_at: Mapping[int, int]) -> int:
        """The same of storages by address."""
        new = {address: num_bytes for address, num_bytes in bytes_at.items() if address not in self._seen}
        self._seen.update(new)
        return sum(new.values())


@repeats
def _unwrapped(saved: Any) -> Tensor:
    return saved.tensor if isinstance(saved, _Held) else saved
