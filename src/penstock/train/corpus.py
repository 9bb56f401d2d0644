"""The documents of a corpus: found in a fixed order, read, and proved to be UTF-8."""

import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

FILES_KEY = "data.files"
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file of text, as it was when it was found."""

    path: Path
    size_bytes: int
    modified_ns: int


def find_documents(files: Sequence[str], suffixes: Sequence[str]) -> tuple[Document, ...]:
    """Return the named files, and the files with one of the suffixes below the named folders, sorted by path.

    A named file is taken whatever its suffix. Below a folder, hidden entries and linked folders are left out.

    Raises:
        ConfigError: a path is missing or cannot be read, or nothing was found.
    """
    paths: set[Path] = set()
    for name in files:
        path = Path(name)
        paths.update(_walk(path, suffixes) if os.path.isdir(path) else [path])
    documents = tuple(_inspect(path) for path in sorted(paths))
    if not documents:
        raise ConfigError(
            f"no file ending in {', '.join(suffixes)} lies below {', '.join(files)}; "
            "name other files or folders, or change data.suffixes",
            key=FILES_KEY,
        )
    return documents


def find_standard_library() -> tuple[Document, ...]:
    """Return the Python sources of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return tuple(_inspect(path) for path in sorted(_walk(root, (".py",), without=NOT_THE_LIBRARY)))


def read_document(path: Path) -> bytes:
    """Return the content of a file that is UTF-8.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8 (with the offset of the first wrong byte).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8; "
            "convert the file to UTF-8, or leave it out",
            key=FILES_KEY,
        ) from error
    return content


def _walk(folder: Path, suffixes: Sequence[str], *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in names:
            path = Path(parent, name)
            # A pipe or a device would block the reader, or never end.
            if name.endswith(tuple(suffixes)) and not name.startswith(".") and os.path.isfile(path):
                yield path


def _inspect(path: Path) -> Document:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is neither a file nor a folder; name a file of text", key=FILES_KEY)
    return Document(path, status.st_size, status.st_mtime_ns)


def _unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"{path}: cannot be read: {reason}. Check the name and the permissions", key=FILES_KEY)
