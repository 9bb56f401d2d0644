"""A token file in the making, in a folder that one process alone writes to.

    <key>.unfinished/tokens   the ids so far
    <key>.unfinished/ends     per document, the number of tokens up to its end

The folder of a process that was killed is taken over by the next one, which begins again. A file lock tells it from one
that is still written to. Another process that comes meanwhile makes a folder of its own.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from penstock.files import ABANDONED_AFTER_S, naming_storage

SUFFIX = ".unfinished"
TOKENS, ENDS = "tokens", "ends"
END_TYPE = np.dtype("<i8")


@dataclass(slots=True, eq=False)
class UnfinishedTokens:
    """Takes the ids of one document after another."""

    folder: Path
    _tokens: BinaryIO
    _ends: BinaryIO
    num_tokens: int = 0

    def write(self, ids: NDArray[np.unsignedinteger], *, is_last: bool) -> None:
        """Add ids; `is_last` ends the document. Raises: OSError."""
        self._tokens.write(ids.tobytes())
        self.num_tokens += len(ids)
        if is_last:
            self._ends.write(np.array([self.num_tokens], dtype=END_TYPE).tobytes())

    def finish(self, tokens: Path, ends: Path) -> None:
        """Move both files to their final names, when the disk holds them. Raises: OSError."""
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        self._set_aside()
        os.replace(self.folder / ENDS, ends)
        os.replace(self.folder / TOKENS, tokens)
        self.discard()

    def discard(self) -> None:
        """Remove what is left."""
        with suppress(OSError):
            self._set_aside()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _set_aside(self) -> None:
        """Give the folder another name first: a process that comes now shall not write into a folder that goes."""
        aside = _new_name(self.folder)
        os.rename(self.folder, aside)
        self.folder = aside


@contextmanager
def unfinished_tokens(cache: Path, key: str) -> Iterator[UnfinishedTokens]:
    """Write the tokens of a key from the first one on; an error or an interruption removes them.

    Raises:
        PenstockError: no space, no permission, or another storage failure.
    """
    with naming_storage(cache):
        _remove_abandoned(cache, key, now_s=time.time())
        folder, tokens = _open_own(cache, key)
    with naming_storage(folder), tokens, (folder / ENDS).open("wb") as ends:
        tokens.truncate(0)
        writer = UnfinishedTokens(folder, tokens, ends)
        try:
            yield writer
        except BaseException:
            writer.discard()
            raise


def _open_own(cache: Path, key: str) -> tuple[Path, BinaryIO]:
    """Return a folder that this process alone writes to, and its file of tokens, locked."""
    shared = cache / f"{key}{SUFFIX}"
    with suppress(FileNotFoundError, FileExistsError):  # another process has just finished, and taken the folder away
        shared.mkdir(exist_ok=True)
        file = (shared / TOKENS).open("ab")
        if _lock(file, shared / TOKENS):
            return shared, file
        file.close()
    own = _new_name(shared)
    own.mkdir()
    return own, (own / TOKENS).open("ab")


def _lock(file: BinaryIO, path: Path) -> bool:
    """Return whether this process alone writes to the file; a file system without locks cannot say so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _remove_abandoned(cache: Path, key: str, *, now_s: float) -> None:
    """Remove what is left of other keys, and of writers that had a folder of their own, after an hour."""
    for folder in cache.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            is_old = now_s - (folder / TOKENS).stat().st_mtime > ABANDONED_AFTER_S
            if is_old and folder.name != f"{key}{SUFFIX}":
                shutil.rmtree(folder, ignore_errors=True)


def _new_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.split('.')[0]}.{uuid4().hex}{SUFFIX}")
