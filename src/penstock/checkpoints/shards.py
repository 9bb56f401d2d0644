"""The files of tensors: one safetensors file per rank and part, with the digest by which damage is found.

The safetensors library itself writes and reads them. torch.distributed.checkpoint has a writer of such files too, but
pickles what its ranks tell each other, or copies a file's content twice where each rank saves alone (docs/design.md).
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError, NotSaved, hint_of_limit, shortened
from penstock.files import FULL, flush

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names in safetensors files of the types that they can hold."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
DIGEST = "sha256"
PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".distcp", ".metadata")
"""The ends of names under which other programs keep pickles."""
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""The first bytes of a pickle, and of a zip of torch.save."""


class FileEntry(BaseModel):
    """The size and digest of a file as it was written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_bytes: Annotated[int, Field(ge=0)]
    sha256: str


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return what safetensors calls a tensor's dtype. Raises: CheckpointError where no file can hold it."""
    if tensor.dtype not in DTYPE_NAMES or type(tensor.detach()) is not Tensor or tensor.layout != torch.strided:
        kind = type(tensor.detach()).__name__ if tensor.layout == torch.strided else "sparse tensor"
        raise CheckpointError(
            f"{name!r} is a {kind} of type {tensor.dtype}, which safetensors files cannot hold; expected a plain "
            f"tensor of {', '.join(str(supported).removeprefix('torch.') for supported in DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[tensor.dtype]


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write contiguous tensors of the CPU and have the disk keep them. Raises: NotSaved, naming the file."""
    with naming_file(path):
        write_tensors(path, tensors)
        return record_of(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write as `write_shard` does, without a digest. Raises: OSError, SafetensorError."""
    # The library makes files that only their owner reads. The umask is seen in a file: a thread must not change it.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    # One key: the library writes several in an order that changes from process to process.
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)
    flush(path)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turn an error of the disk in the block into a NotSaved that names this file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> NotSaved:
    """Return an error that says why a file could not be written, and what helps."""
    number = getattr(error, "errno", None) or _error_number(str(error))
    reason = os.strerror(number) if number else str(error)
    fix = "Free some space" if number in FULL else "See to its permissions"
    return NotSaved(
        f"{path}: cannot be written: {reason}{hint_of_limit(reason) or f'. {fix}, or choose another folder'}"
    )


def _error_number(text: str) -> int | None:
    """Return the number of the system's error, which the safetensors library has in its message only."""
    match = re.search(r"os error (\d+)", text)
    return int(match[1]) if match and int(match[1]) in errno.errorcode else None


def require_file_name(name: str) -> str:
    """Return a name if it is that of a file in the folder itself, and no path out of it. Raises: ValueError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{shortened(name)} is not the name of a file in the same folder")
    return name


def require_regular(path: Path) -> None:
    """Refuse a path that could be read without end, such as a device or a pipe. Raises: OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def require_visible(path: Path, num_bytes: int | None = None) -> None:
    """Refuse a file of another rank that this one does not see as it was written. Raises: NotSaved."""
    if not path.exists() or (num_bytes is not None and path.stat().st_size != num_bytes):
        raise NotSaved(
            f"{path}: another rank wrote it, but rank 0 does not see it; choose a folder on a file system that all "
            "hosts share"
        )


def record_of(path: Path) -> FileEntry:
    """Read a file as a whole and describe it. Raises: OSError."""
    require_regular(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, DIGEST).hexdigest()
        return FileEntry(num_bytes=file.tell(), sha256=digest)


def problem_of(path: Path, expected: FileEntry) -> str:
    """Return what is wrong with a file, or nothing."""
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path}: has {size} bytes, but {expected.num_bytes} were written"
        actual = record_of(path)
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}"
    if actual != expected:
        return (
            f"{path}: was changed or damaged: its {DIGEST} is {actual.sha256[:12]}..., "
            f"but {expected.sha256[:12]}... was written"
        )
    return ""


def read_tensors(
    path: Path, names: Iterable[str], rows: Mapping[str, range] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Read the named tensors of a file; of a name in `rows`, these rows only. Raises: CheckpointError."""
    with _opened(path) as file:
        return {
            name: file.get_slice(name)[rows[name].start : rows[name].stop] if name in rows else file.get_tensor(name)
            for name in names
        }


def read_files(files: Mapping[str, Path], rows: Mapping[str, range]) -> dict[str, Tensor]:
    """Read tensors of several files, one file after the other; `files` has the file of each tensor by name.

    Of a name in `rows`, these rows only are read. Raises: CheckpointError.
    """
    names_by_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        names_by_file.setdefault(file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in names_by_file.items():
        tensors |= read_tensors(file, names, rows)
    return tensors


def shapes_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of every tensor of a file. Raises: CheckpointError naming the file."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with the safetensors library, which takes no path that is not UTF-8.

    Raises: CheckpointError, also for what fails in the block.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            name = str(path) if _is_utf8(path) else f"/dev/fd/{file.fileno()}"
            with safe_open(name, framework="pt") as tensors:
                yield tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as a safetensors file: {error}") from error


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def pickles_in(folder: Path, listed_names: Iterable[str] = ()) -> list[str]:
    """Return the names of files that are pickles, by their name or first bytes, leaving out `listed_names`."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    names = sorted(files - set(listed_names))
    return [name for name in names if name.endswith(PICKLE_SUFFIXES) or _starts_as_pickle(folder / name)]


def _starts_as_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(PICKLE_STARTS)
