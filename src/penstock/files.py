"""Writing files so that a reader sees the whole file or none, and storage failures name the path."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from penstock.errors import PenstockError, hint_of_limit

PARTIAL_SUFFIX = ".partial"
ABANDONED_AFTER_S = 3600.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a system that has no space left, or grants no more."""


@contextmanager
def naming_storage(path: Path) -> Iterator[None]:
    """Turn a storage failure inside the block into a PenstockError with the path and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        cure = "Free some space" if error.errno in FULL else "See to its name and permissions"
        cure = hint_of_limit(reason) or f". {cure}, or choose another folder"
        raise PenstockError(f"{path}: cannot be written: {reason}{cure}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that appears under `path` when the block ends well, and never otherwise.

    The folder must exist. Any number of processes may write the same path at once: the last to end wins.

    Raises:
        PenstockError: no space, no permission, or another storage failure; nothing stays behind.
    """
    with naming_storage(path):
        partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL_SUFFIX}")
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def flush(path: Path) -> None:
    """Have the disk keep a file's content, or which names lie in a folder, as after a rename. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path, *, now_s: float) -> None:
    """Remove what killed writers left in `folder`; `now_s` is seconds since the epoch.

    A file that was written to within the last hour may still have its writer and stays.
    """
    for partial in folder.glob(f"*{PARTIAL_SUFFIX}"):
        with suppress(OSError):
            if now_s - partial.stat().st_mtime > ABANDONED_AFTER_S:
                partial.unlink()
