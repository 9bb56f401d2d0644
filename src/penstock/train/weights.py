"""Saving the trained weights as one safetensors file with the unsplit model's names, whatever the split.

    rank 0                                    another rank
    writes its own tensors
      in a thread; meanwhile  -- WAIT ----->  waits for the next request, at most the step's deadline
    wants a tensor            -- SEND ----->
                              <-- tensor ---  sends it
    has closed the file       -- END ------>

So a disk may take any time, and a rank that is gone is still noticed within the deadline. Rank 0 holds one tensor of
another rank at a time. The safetensors library would need all of them at once, so the file is written by hand: the
length of the header as 8 bytes, the header as JSON (name to dtype, shape and place), then the tensors without gaps.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from penstock.checkpoints.shards import DTYPE_NAMES
from penstock.checkpoints.work import run_in_thread
from penstock.errors import NotSaved, PenstockError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport
from penstock.files import atomic_file
from penstock.pipeline import Pipeline
from penstock.version import VERSION

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PIECE_BYTES = 64 << 20
"""Written at once, and then flushed to the disk, so that a slow disk still shows progress."""
STALLED_AFTER_S = 1800.0
"""How long one piece may take while other ranks wait."""
REQUESTS_PER_DEADLINE = 4


class _Request(IntEnum):
    """What rank 0 asks of another rank."""

    WAIT = 0
    SEND = 1
    END = 2


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
        NotSaved: on every rank, if the file cannot be written or a tensor's type has no place in the format.
        PipelineError: if a rank is lost meanwhile.
    """
    transport = pipeline.transport
    own = _own_tensors(pipeline)
    entries = _list_entries(transport, own)
    problem = ""
    if transport.rank == 0:
        others = _OtherRanks(transport, pipeline.device)
        problem = _write(path, entries, own, others)
        others.request(_Request.END)
    else:
        _send_on_request(
            transport, pipeline.device, [own[each.name] for each in entries if each.rank == transport.rank]
        )
    failure = Control(transport).all_gather_object(problem)[0]
    if failure:
        raise NotSaved(f"the weights are not saved: {failure}")


def _own_tensors(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return what this rank saves, by its name in the unsplit model."""
    found = pipeline.state_dict()
    kept = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in kept.items() if name not in pipeline.copied_names}


def _list_entries(transport: Transport, own: dict[str, Tensor]) -> list[_Entry]:
    """Return the tensors of all ranks in the order of the file, the same on every rank."""
    described = [[name, DTYPE_NAMES.get(t.dtype, str(t.dtype)), list(t.shape)] for name, t in own.items()]
    gathered = cast("list[list[tuple[str, str, list[int]]]]", Control(transport).all_gather_object(described))
    entries: dict[str, _Entry] = {}
    for rank, listed in enumerate(gathered):
        for name, dtype, shape in listed:
            if dtype not in DTYPES:
                raise NotSaved(
                    f"{name!r} on rank {rank} has type {dtype}, which safetensors files cannot hold; "
                    f"convert it to one of {', '.join(str(known) for known in DTYPE_NAMES)}"
                )
            entries.setdefault(name, _Entry(name, DTYPES[dtype], tuple(shape), rank))
    # Wide types first, so that every tensor lies at a multiple of its item's size.
    return sorted(entries.values(), key=lambda entry: (-entry.dtype.itemsize, entry.name))


@dataclass(slots=True)
class _OtherRanks:
    """The ranks that have tensors for rank 0."""

    transport: Transport
    device: torch.device
    reminded_s: float = 0.0
    """`time.monotonic()` when all of them were last failure to wait."""

    def request(self, what: _Request, *, rank: int | None = None) -> None:
        """Ask one rank, or all of them."""
        for peer in range(1, self.transport.num_ranks) if rank is None else (rank,):
            self.transport.wait(self.transport.post_send(peer, torch.tensor([what], device=self.device)))

    def remind(self) -> None:
        """Tell all ranks to wait on, unless they were failure so just now."""
        if time.monotonic() - self.reminded_s >= self._pause_s:
            self.request(_Request.WAIT)
            self.reminded_s = time.monotonic()

    def fetch(self, entry: _Entry) -> Tensor:
        """Return the next tensor of its rank."""
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        if entry.size_bytes:
            self.remind()
            self.request(_Request.SEND, rank=entry.rank)
            self.transport.wait(self.transport.post_receive(entry.rank, tensor))
            self.remind()
        return tensor

    def keep_waiting(self, action: Callable[[], None]) -> None:
        """Run an action that may take longer than the deadline, while the other ranks are failure to wait.

        Raises: what the action raises; TimeoutError if it does not end.
        """
        if self.transport.num_ranks == 1:
            action()
            return
        self.remind()
        ended, stalled_s = run_in_thread(action), time.monotonic() + STALLED_AFTER_S
        while not wait([ended], timeout=min(self._pause_s, STALLED_AFTER_S)).done:
            if time.monotonic() >= stalled_s:
                raise TimeoutError(errno.ETIMEDOUT, f"the disk took no data for {STALLED_AFTER_S:g} s")
            self.remind()
        ended.result()

    @property
    def _pause_s(self) -> float:
        return self.transport.deadline_s / REQUESTS_PER_DEADLINE


def _send_on_request(transport: Transport, device: torch.device, tensors: Sequence[Tensor]) -> None:
    """Send the tensors in order, each when rank 0 asks for it, until it asks for no more."""
    left = iter([tensor for tensor in tensors if tensor.nbytes])
    request = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        transport.wait(transport.post_receive(0, request))
        match _Request(int(request)):
            case _Request.SEND:
                transport.wait(transport.post_send(0, next(left).contiguous()))
            case _Request.END:
                return
            case _Request.WAIT:
                continue


@dataclass(slots=True)
class _FlushedFile:
    """A file whose content goes to the disk piece by piece, so that no wait for the disk is long."""

    file: BinaryIO
    unflushed_bytes: int = 0

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.unflushed_bytes += len(content)
        if self.unflushed_bytes >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.unflushed_bytes = 0


def _write(path: Path, entries: Sequence[_Entry], own: dict[str, Tensor], others: _OtherRanks) -> str:
    """Write the file; return why it could not be written, or nothing."""
    try:
        with atomic_file(path) as file:
            flushed = _FlushedFile(file)
            others.keep_waiting(partial(flushed.write, _header(entries)))
            for entry in entries:
                _write_tensor(flushed, own[entry.name] if entry.rank == 0 else others.fetch(entry), others)
            others.keep_waiting(flushed.flush)
    except PipelineError:
        raise
    except PenstockError as error:
        return str(error)
    return ""


def _write_tensor(file: _FlushedFile, tensor: Tensor, others: _OtherRanks) -> None:
    content = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(content), PIECE_BYTES):
        others.keep_waiting(partial(file.write, content[begin : begin + PIECE_BYTES]))


def _header(entries: Sequence[_Entry]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt", "penstock": VERSION}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.size_bytes
        table[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
