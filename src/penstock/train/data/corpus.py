"""The documents of a corpus: found in a fixed order, read piece by piece, and proved to be UTF-8."""

import codecs
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

FILES_KEY = "data.files"
PIECE_BYTES = 1 << 20
"""Most that is read, and tokenized, at once."""
MOST_CHARACTER_BYTES = 4
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file of text, as it was when it was found."""

    path: Path
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files of UTF-8 text; each is a document, which is read in pieces so that none is ever held whole."""

    documents: Sequence[Document]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def num_bytes(self) -> int:
        """About how much there is to read."""
        return sum(document.size_bytes for document in self.documents)

    def stamp(self) -> list[object]:
        """Return plain values that differ where the content may have changed."""
        return [[str(file.path.absolute()), file.size_bytes, file.modified_ns] for file in self.documents]

    def name(self, index: int) -> str:
        """Return what a document is called in messages."""
        return str(self.documents[index].path)

    def pieces(self, index: int) -> Iterator[bytes]:
        """Yield a document; where a piece ends depends on the content alone.

        Raises: ConfigError, if it cannot be read, or is no text.
        """
        path, begin = self.documents[index].path, 0
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with path.open("rb") as file:
                while piece := _cut(file.read(PIECE_BYTES)):
                    _require_utf8(decoder, piece, path, begin)
                    yield piece
                    begin += len(piece)
                    file.seek(begin)
        except OSError as error:
            raise unreadable(path, error) from error
        _require_utf8(decoder, b"", path, begin)


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


def _require_utf8(decoder: codecs.IncrementalDecoder, piece: bytes, path: Path, begin: int) -> None:
    """Prove that a document is UTF-8 up to the end of its next piece, at whose end a character may be cut.

    The last piece is an empty one. Raises: ConfigError, with the offset of the first wrong byte.
    """
    try:
        decoder.decode(piece, not piece)
    except UnicodeDecodeError as error:
        offset = begin + len(piece) - len(error.object) + error.start
        raise ConfigError(
            f"{path}: byte 0x{error.object[error.start]:02x} at offset {offset} is not UTF-8; "
            "convert the file to UTF-8, or leave it out",
            key=FILES_KEY,
        ) from error


def _cut(content: bytes) -> bytes:
    """Return what is left of a full piece when it ends behind a line, else before a space, else behind a character."""
    if len(content) < PIECE_BYTES:
        return content
    end = content.rfind(b"\n") + 1
    if not end:
        end = content.rfind(b" ")
    if end <= 0:
        end = len(content)
        while end > len(content) - MOST_CHARACTER_BYTES and content[end - 1] & 0xC0 == 0x80:
            end -= 1
        end -= content[end - 1] >= 0xC0
    return content[:end]


def _walk(folder: Path, suffixes: Sequence[str], *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

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
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is neither a file nor a folder; name a file of text", key=FILES_KEY)
    return Document(path, status.st_size, status.st_mtime_ns)


def unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"{path}: cannot be read: {reason}. Check the name and the permissions", key=FILES_KEY)
