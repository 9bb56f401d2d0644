"""Saving the trained weights as one safetensors file with the unsplit model's names, whatever the split.

The file is written while the tensors arrive, so that rank 0 holds one foreign tensor at a time. Its layout: the length
of the header as 8 bytes, the header as JSON (name to dtype, shape and place), then the tensors without gaps.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from penstock.errors import CheckpointError, PenstockError, PipelineError
from penstock.execute.transport.protocol import Transport
from penstock.pipeline import Pipeline
from penstock.train.files import atomic_file
from penstock.version import VERSION

FORMAT_NAMES = {
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
DTYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file, and the rank that has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rank: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def save_weights(path: Path, pipeline: Pipeline) -> None:
    """Write all parameters and saved buffers of all ranks into one file on rank 0; every rank calls it.

    The file appears whole or not at all. Of tied parameters the first name is saved, once.

    Raises:
        CheckpointError: on every rank, if the file cannot be written or a tensor's type has no place in the format.
        PipelineError: if a rank is lost meanwhile.
    """
    transport = pipeline.transport
    own = _own_tensors(pipeline)
    entries = _list_entries(transport, own)
    problem = ""
    if transport.rank == 0:
        arriving = _collect(transport, entries, own, pipeline.device)
        problem = _write(path, entries, arriving)
        for _ in arriving:
            pass  # the other ranks send all they have, whatever became of the file
    else:
        _send(transport, entries, own)
    told = transport.all_gather_object(problem)[0]
    if told:
        raise CheckpointError(f"the weights are not saved: {told}")


def _own_tensors(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return what this rank saves, by its name in the unsplit model."""
    found = {
        f"{layer}.{name}": value
        for stage in pipeline.stages
        for layer, module in stage.layers.items()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    return {name: tensor for name, tensor in found.items() if name not in pipeline.copied_names}


def _list_entries(transport: Transport, own: dict[str, Tensor]) -> list[_Entry]:
    """Return the tensors of all ranks in the order of the file, the same on every rank."""
    described = [[name, FORMAT_NAMES.get(t.dtype, str(t.dtype)), list(t.shape)] for name, t in own.items()]
    gathered = cast("list[list[tuple[str, str, list[int]]]]", transport.all_gather_object(described))
    entries: dict[str, _Entry] = {}
    for rank, listed in enumerate(gathered):
        for name, dtype, shape in listed:
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{name!r} on rank {rank} has type {dtype}, which safetensors files cannot hold; "
                    f"convert it to one of {', '.join(str(known) for known in FORMAT_NAMES)}"
                )
            entries.setdefault(name, _Entry(name, DTYPES[dtype], tuple(shape), rank))
    # Wide types first, so that every tensor lies at a multiple of its item's size.
    return sorted(entries.values(), key=lambda entry: (-entry.dtype.itemsize, entry.name))


def _collect(
    transport: Transport, entries: Sequence[_Entry], own: dict[str, Tensor], device: torch.device
) -> Iterator[Tensor]:
    """Yield the tensors in order, each when it has arrived."""
    for entry in entries:
        if entry.rank == transport.rank:
            yield own[entry.name]
            continue
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if entry.size_bytes:
            transport.wait(transport.post_receive(entry.rank, tensor))
        yield tensor


def _send(transport: Transport, entries: Sequence[_Entry], own: dict[str, Tensor]) -> None:
    for entry in entries:
        if entry.rank == transport.rank and entry.size_bytes:
            transport.wait(transport.post_send(0, own[entry.name].contiguous()))


def _write(path: Path, entries: Sequence[_Entry], tensors: Iterator[Tensor]) -> str:
    """Write the file; return why it could not be written, or nothing."""
    try:
        with atomic_file(path) as file:
            file.write(_header(entries))
            for tensor in tensors:
                file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    except PipelineError:
        raise
    except PenstockError as error:
        return str(error)
    return ""


def _header(entries: Sequence[_Entry]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt", "penstock": VERSION}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.size_bytes
        table[entry.name] = {
            "dtype": FORMAT_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
