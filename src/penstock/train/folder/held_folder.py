"""A folder that is held open, so that it is found again after somebody has renamed it."""

import os
import weakref
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux says what is open, and under which name now."""


class HeldFolder:
    """An existing folder of this process."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether its path still stands for this folder."""
        return self._is_at(self.path)

    def found(self) -> Path | None:
        """Return where the folder is now; None where it was removed, or the system does not say."""
        if self.is_in_place:
            return self.path
        try:
            path = Path(os.readlink(DESCRIPTORS / str(self._descriptor)))
        except OSError:
            return None
        return path if self._is_at(path) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False
