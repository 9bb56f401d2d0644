"""Numbers in a page: columns of a table, one after the other, compressed and written as text.

    gzip( [column 0][column 1]... )  in base64, and beside it where each column begins and of what type it is

Each column begins at a multiple of 8 bytes, so that a browser can look at it in place. Compressing without a date gives
the same text for the same numbers.
"""

import gzip
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 8
TYPES = ("uint8", "int32", "uint32", "float64")


@dataclass(frozen=True, slots=True)
class Packed:
    """Columns as text, and the table of contents that belongs to it."""

    text: str
    contents: list[dict[str, Any]]
    """Per column: name, type, offset in bytes, and length in numbers."""


def pack(columns: Mapping[str, NDArray[Any]]) -> Packed:
    """Pack columns of the types that both sides know."""
    parts: list[bytes] = []
    contents: list[dict[str, Any]] = []
    offset = 0
    for name, column in columns.items():
        type_name = column.dtype.name
        assert type_name in TYPES, f"column {name} is of type {type_name}"
        data = column.astype(column.dtype.newbyteorder("<")).tobytes()
        contents.append({"name": name, "type": type_name, "offset": offset, "length": len(column)})
        parts.append(data + bytes(-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    packed = gzip.compress(b"".join(parts), compresslevel=9, mtime=0)
    return Packed(b64encode(packed).decode(), contents)


def whole_ticks(seconds: NDArray[np.float64], tick_s: float) -> NDArray[np.int64]:
    """Return times as whole numbers of ticks: equal times stay equal."""
    return np.rint(seconds / tick_s).astype(np.int64)


def tick_for(end_s: float) -> float:
    """Return a power of ten, in seconds, so small that 31 bits just count to the end."""
    if end_s <= 0:
        return 1.0
    exponent = int(np.ceil(np.log10(end_s / (2**31 - 1))))
    return float(f"1e{exponent}")
