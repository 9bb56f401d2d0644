"""The bytes of the storages that operations make, from when each is made until nobody holds it any more.

forward    begin ──── live bytes ────► end     workspace = most - those at the end
backward   begin ──── live bytes ────► end     workspace = most - those at the begin - those made and still held
"""

import weakref
from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from penstock.models.cutting.undocumented import storage_key


class LiveBytes:
    """Counts the storages that are alive of those that were made under its eyes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes that are alive now."""
        self.most_bytes = 0
        """The most that were alive since `begin`."""
        self._new_bytes: dict[int, int] = {}
        """Bytes of living storages that were made since `begin`, by storage."""
        self._begin_bytes = 0
        self._known_keys: set[int] = set()

    def begin(self) -> None:
        """Begin a pass."""
        self._begin_bytes = self.most_bytes = self.num_bytes
        self._new_bytes.clear()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that an operation has made."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in self._known_keys:
                self._known_keys.add(key)
                self._add(key, storage)

    def forward_workspace(self) -> int:
        """Return the most bytes since `begin` beside those that are alive now."""
        return max(0, self.most_bytes - self.num_bytes)

    def backward_workspace(self) -> int:
        """Return the most bytes since `begin` beside those that were alive at that time."""
        return self.most_bytes - self._begin_bytes

    def living_bytes(self) -> dict[int, int]:
        """Return the bytes of the living storages that were made since `begin`, by storage."""
        return dict(self._new_bytes)

    def _add(self, key: int, storage: UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._new_bytes[key] = num_bytes
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        weakref.finalize(storage, self._remove, key, num_bytes).atexit = False

    def _remove(self, key: int, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._known_keys.discard(key)
        self._new_bytes.pop(key, None)
