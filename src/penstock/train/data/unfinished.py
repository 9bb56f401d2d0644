"""A token file in the making: a process that is killed leaves it, and the next one writes on where that one was.

    <key>.unfinished/tokens       the ids so far
    <key>.unfinished/ends         per document, the number of tokens up to its end
    <key>.unfinished/place.json   how much of both counts, written after them

One process at a time writes there, by a file lock. Another one that comes meanwhile makes a folder of its own.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.files import ABANDONED_AFTER_S, atomic_file, naming_storage

SUFFIX = ".unfinished"
TOKENS, ENDS, PLACE = "tokens", "ends", "place.json"
END_TYPE = np.dtype("<i8")
SECONDS_BETWEEN_PLACES = 5.0
"""As much work is lost at most, but for the work on one piece."""


class Place(BaseModel):
    """How far the writing has come."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    digest: str
    """Of the documents and the tokenizer."""
    document: int = Field(default=0, ge=0)
    """The next one to write of."""
    offset: int = Field(default=0, ge=0)
    """Bytes of that document that are written."""
    num_tokens: int = Field(default=0, ge=0)


@dataclass(slots=True, eq=False)
class UnfinishedTokens:
    """Takes the ids of one document after another."""

    folder: Path
    place: Place
    _tokens: FileIO
    _ends: FileIO
    _clock: Callable[[], float]
    _kept_s: float

    def write(self, ids: NDArray[np.unsignedinteger], num_bytes: int, *, is_last: bool) -> None:
        """Add the ids of so many bytes; `is_last` ends the document. Raises: OSError."""
        place = self.place
        num_tokens = place.num_tokens + len(ids)
        _write_all(self._tokens, ids.tobytes())
        if is_last:
            _write_all(self._ends, np.array([num_tokens], dtype=END_TYPE).tobytes())
        following = (place.document + 1, 0) if is_last else (place.document, place.offset + num_bytes)
        self.place = Place(digest=place.digest, document=following[0], offset=following[1], num_tokens=num_tokens)
        if self._clock() - self._kept_s >= SECONDS_BETWEEN_PLACES:
            self.keep()

    def keep(self) -> None:
        """Have the disk hold what is written, and then how much of it counts. Raises: OSError, PenstockError."""
        self._flush()
        with atomic_file(self.folder / PLACE) as file:
            file.write(self.place.model_dump_json().encode())
        self._kept_s = self._clock()

    def finish(self, tokens: Path, ends: Path) -> None:
        """Move both files to their final names. Raises: OSError."""
        self._flush()
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

    def _flush(self) -> None:
        for file in (self._tokens, self._ends):
            os.fsync(file.fileno())


@contextmanager
def unfinished_tokens(
    cache: Path, key: str, *, digest: str, item_bytes: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[UnfinishedTokens]:
    """Write the tokens of a key, on from where a process was that did not end well.

    An interruption leaves them for the next process; an error removes them.

    Raises:
        PenstockError: no space, no permission, or another storage failure.
    """
    with naming_storage(cache):
        _remove_abandoned(cache, key, now_s=time.time())
        folder, tokens = _open_own(cache, key)
    with naming_storage(folder), tokens, (folder / ENDS).open("ab+", buffering=0) as ends:
        place = _found_place(folder, digest, item_bytes)
        tokens.truncate(place.num_tokens * item_bytes)
        ends.truncate(place.document * END_TYPE.itemsize)
        writer = UnfinishedTokens(folder, place, tokens, ends, clock, clock())
        try:
            yield writer
        except Exception:
            writer.discard()
            raise
        except BaseException:  # Ctrl-C, say
            writer.keep()
            raise


def _open_own(cache: Path, key: str) -> tuple[Path, FileIO]:
    """Return a folder that this process alone writes to, and its file of tokens, locked."""
    shared = cache / f"{key}{SUFFIX}"
    with suppress(FileNotFoundError, FileExistsError):  # another process has just finished, and taken the folder away
        shared.mkdir(exist_ok=True)
        file = (shared / TOKENS).open("ab+", buffering=0)
        if _lock(file, shared / TOKENS):
            return shared, file
        file.close()
    own = _new_name(shared)
    own.mkdir()
    return own, (own / TOKENS).open("ab+", buffering=0)


def _lock(file: FileIO, path: Path) -> bool:
    """Return whether this process alone writes to the file; a file system without locks cannot say so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _found_place(folder: Path, digest: str, item_bytes: int) -> Place:
    """Return how much of the files counts: nothing where they are of other documents, or damaged."""
    try:
        place = Place.model_validate_json((folder / PLACE).read_bytes())
        sizes = [(folder / name).stat().st_size for name in (TOKENS, ENDS)]
    except (OSError, ValidationError):
        return Place(digest=digest)
    is_whole = sizes[0] >= place.num_tokens * item_bytes and sizes[1] >= place.document * END_TYPE.itemsize
    return place if place.digest == digest and is_whole else Place(digest=digest)


def _remove_abandoned(cache: Path, key: str, *, now_s: float) -> None:
    """Remove what is left of other keys, and of writers that had a folder of their own, after an hour."""
    for folder in cache.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            is_old = now_s - (folder / TOKENS).stat().st_mtime > ABANDONED_AFTER_S
            if is_old and folder.name != f"{key}{SUFFIX}":
                shutil.rmtree(folder, ignore_errors=True)


def _new_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.split('.')[0]}.{uuid4().hex}{SUFFIX}")


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
