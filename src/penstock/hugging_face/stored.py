"""Tensors in safetensors files: where the header says that each is, and a plain read of these bytes alone.

    8 bytes      length of the header, little-endian
    header       JSON: name -> dtype, shape, data_offsets [begin, end) behind the header
    data

The safetensors library maps a file into memory, so nobody can say how much of it is read. Here every byte that is read
goes through `read`, so that readers can count.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.pretrained import weight_map
from penstock.checkpoints.shards import DTYPES, pickles_in
from penstock.errors import CheckpointError, nearest, shortened

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library, so that a damaged length allocates no memory."""
METADATA = "__metadata__"
WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def on_meta(self) -> Tensor:
        """Return a tensor of this type and shape without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> Tensor:
        """Read the bytes of this tensor. Raises: CheckpointError, naming the file."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: Tensor) -> None:
        """Read the bytes into a contiguous tensor of this type and shape on the CPU. Raises: CheckpointError."""
        content = tensor.detach().reshape(-1).view(torch.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin)
                _read_into(file, content.numpy().data)
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error


def stored_in(path: Path) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a file by name, and the bytes of its header, which is all that is read.

    Raises: CheckpointError, naming the file, where it is no whole safetensors file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            num_header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            data_offset = LENGTH_BYTES + num_header_bytes
            if num_header_bytes > MOST_HEADER_BYTES or data_offset > num_file_bytes:
                raise _unreadable(path, f"its header would have {num_header_bytes} bytes, the file {num_file_bytes}")
            content = bytearray(num_header_bytes)
            _read_into(file, memoryview(content))
        header = json.loads(content)
        entries = {name: entry for name, entry in header.items() if name != METADATA}
        return {
            name: _stored(path, name, entry, data_offset, num_file_bytes) for name, entry in entries.items()
        }, data_offset
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"its header is no JSON object: {error}") from error


def _stored(path: Path, name: str, entry: Any, data_offset: int, num_file_bytes: int) -> Stored:
    if not _is_entry(entry):
        raise _unreadable(path, f"the header has {shortened(entry)} for {name!r}")
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: {name!r} has the type {shortened(entry['dtype'])}; expected {', '.join(DTYPES)}. Save the "
            "weights in one of these types, unquantized"
        )
    begin, end = entry["data_offsets"]
    stored = Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_offset + begin)
    if end - begin != stored.num_bytes or data_offset + end > num_file_bytes:
        raise _unreadable(
            path,
            f"{name!r} is at the bytes {begin} to {end} of {num_file_bytes - data_offset}, but has {stored.num_bytes}",
        )
    return stored


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("dtype"), str):
        return False
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    if not isinstance(offsets, list) or not isinstance(shape, list) or len(offsets) != 2:
        return False
    return all(isinstance(number, int) and number >= 0 for number in (*offsets, *shape))


def _read_into(file: Any, content: memoryview) -> None:
    """Fill a buffer; the system reads at most 2 GiB at once. Raises: OSError, at the end of the file."""
    filled = 0
    while filled < len(content):
        num_bytes = file.readinto(content[filled:])
        if not num_bytes:
            raise OSError(f"it ends {len(content) - filled} bytes too early")
        filled += num_bytes


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read as a safetensors file: {reason}. Get or save the file anew")


def stored_in_folder(folder: Path) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a folder's files by name, and the bytes of all headers, which are all that is read.

    Raises: CheckpointError: no such folder, no weights in it, or a file is not as the index says.
    """
    file_by_name = _listed_files(folder)
    headers: dict[str, dict[str, Stored]] = {}
    total = 0
    for file in sorted(set(file_by_name.values())):
        headers[file], num_bytes = stored_in(folder / file)
        total += num_bytes
    tensors = {name: stored for header in headers.values() for name, stored in header.items()}
    for name, file in file_by_name.items() if file_by_name.keys() != {WHOLE} else ():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: has no {name!r}, which {INDEX} lists there.{nearest(name, headers[file])} Get both "
                "files anew, of the same model"
            )
        tensors[name] = headers[file][name]
    return tensors, total


def _listed_files(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that the index of a folder lists; of a folder without one, its only file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; expected one with {WHOLE}, or with {INDEX}")
    if (folder / WHOLE).is_file():
        return {WHOLE: WHOLE}
    if (folder / INDEX).is_file():
        return weight_map(folder / INDEX)
    pickles = pickles_in(folder)
    hint = f"Its {pickles[0]} is not read: a pickle can run any code. " if pickles else ""
    raise CheckpointError(
        f"{folder}: holds no weights; expected {WHOLE}, or {INDEX}. {hint}Save the model with `save_pretrained` of "
        "transformers 5, or name a folder that it wrote"
    )
