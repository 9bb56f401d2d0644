"""The weights of a training as safetensors files, which any reader of that format opens.

    up to 5 GB   weights.safetensors                          the same bytes on any number of ranks
    more         weights-00001-of-00003.safetensors, ...      each rank writes its own tensors, at most 5 GB a file
                 weights.safetensors.index.json               which file holds which tensor: the Hugging Face layout

    every rank   a thread writes and flushes files under other names ─► gather: all written
    rank 0                                                              a thread makes one file of them, or renames them
    every rank                                                          gather: done

A disk may thus take any time, and a rank that is lost is still noticed within the deadline.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from torch import Tensor

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import (
    WEIGHTS,
    Content,
    Described,
    file_name,
    owned_names,
    require_equal_replicas,
)
from penstock.checkpoints.held import Held
from penstock.checkpoints.manifest import TensorEntry
from penstock.checkpoints.shards import naming_file, read_tensors, require_visible, write_tensors
from penstock.checkpoints.staging import Staging, stage
from penstock.checkpoints.work import run_together
from penstock.errors import NotSaved
from penstock.files import PARTIAL_SUFFIX, atomic_file, flush_folder
from penstock.pipeline import Pipeline

WHOLE = f"{WEIGHTS}.safetensors"
INDEX = f"{WHOLE}.index.json"
SHARDS = f"{WEIGHTS}-*-of-*.safetensors"
FILE_BYTES = 5_000_000_000
"""The most tensors in one file, unless a single one is larger; Hugging Face libraries have the same rule."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank writes at once."""

    path: Path
    """The file of which it becomes a part, or all."""
    partial: Path
    """Where it is written."""
    rank: int
    names: tuple[str, ...]
    num_bytes: int


def save_weights(folder: Path, pipeline: Pipeline) -> None:
    """Write all parameters and saved buffers of all ranks into a folder that all of them see; every rank calls it.

    The files appear when they are whole, or not at all. Of tied parameters the first name is saved, once.

    Raises:
        NotSaved: on every rank, if a file cannot be written or a tensor's type has no place in the format.
        PipelineError: if a rank is lost meanwhile.
    """
    control = pipeline.control
    token = str(control.on_rank_0(lambda: uuid4().hex))
    content, everyone = _content(pipeline)
    shards = _shards(folder, everyone, token)
    num_bytes = sum(shard.num_bytes for shard in shards)
    own = [shard for shard in shards if shard.rank == control.rank]
    whole = _whole(pipeline, content, everyone)

    def write() -> None:
        for shard in own:
            with naming_file(shard.path):
                tensors = {name: whole[name] if name in whole else _copy(content.weights[name]) for name in shard.names}
                write_tensors(shard.partial, tensors)

    def publish() -> None:
        if control.rank == 0:
            _publish(folder, shards, _entries(shards, everyone), token)

    with _removing([shard.partial for shard in own]):
        for action in (write, publish):
            run_together(control, action, num_bytes=num_bytes, what=str(folder), error_type=NotSaved)


def require_saveable(pipeline: Pipeline) -> int:
    """Return how many bytes the weights of all ranks are, if files can hold them; every rank calls it.

    Raises: NotSaved, on every rank.
    """
    names = {name: theirs for theirs in _content(pipeline)[1] for name in theirs["weights"]}
    return sum(_num_bytes(theirs, name) for name, theirs in names.items())


def index_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the content of an index of these tensors."""
    total = sum(entry.num_bytes for entry in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: entry.file for name, entry in entries.items()}}
    return json.dumps(index, indent=1).encode()


def _content(pipeline: Pipeline) -> tuple[Content, list[Described]]:
    """Return what this rank has, and what each tells of it."""
    content: list[Content] = []

    def describe() -> Described:
        content.append(Content.of(pipeline, None))
        return content[0].described()

    everyone = pipeline.control.together(describe, failing_as(NotSaved))
    require_equal_replicas(everyone, pipeline.control.places)
    return content[0], everyone


def _whole(pipeline: Pipeline, content: Content, everyone: Sequence[Described]) -> Mapping[str, Tensor]:
    """Return the tensors that this rank writes, if replicas hold some by their rows; else none."""
    if not any(theirs["by_rows"] for theirs in everyone):
        return {}
    return stage(Staging(), pipeline, content, owned_names(everyone))[WEIGHTS]


def _shards(folder: Path, everyone: Sequence[Described], token: str) -> list[_Shard]:
    """Return the files of all ranks, the same on every rank."""
    found: list[tuple[int, list[str], int]] = []
    for rank, (theirs, owned) in enumerate(zip(everyone, owned_names(everyone), strict=True)):
        names: list[str] = []
        held = 0
        for name in sorted(owned):
            num_bytes = _num_bytes(theirs, name)
            if names and held + num_bytes > FILE_BYTES:
                found.append((rank, names, held))
                names, held = [], 0
            names, held = [*names, name], held + num_bytes
        found += [(rank, names, held)] if names else []
    is_whole = sum(num_bytes for _, _, num_bytes in found) <= FILE_BYTES
    shards = []
    for number, (rank, names, num_bytes) in enumerate(found or [(0, [], 0)]):
        name = file_name(WEIGHTS, number, len(found))
        partial = folder / f"{name}.{token}{PARTIAL_SUFFIX}"
        shards.append(_Shard(folder / (WHOLE if is_whole else name), partial, rank, tuple(names), num_bytes))
    return shards


def _entries(shards: Sequence[_Shard], everyone: Sequence[Described]) -> dict[str, TensorEntry]:
    return {name: _entry(everyone[each.rank], name, each.path.name) for each in shards for name in each.names}


def _num_bytes(described: Described, name: str) -> int:
    """Bytes of a tensor, whichever file it goes to."""
    return _entry(described, name, WHOLE).num_bytes


def _entry(described: Described, name: str, file: str) -> TensorEntry:
    dtype, shape = described["weights"][name]
    return TensorEntry(dtype=dtype, shape=shape, file=file)


def _copy(held: Held) -> Tensor:
    """Return a contiguous copy on the CPU: the library refuses tensors that share memory."""
    return held.local.to("cpu", copy=True).contiguous()


def _publish(folder: Path, shards: Sequence[_Shard], entries: Mapping[str, TensorEntry], token: str) -> None:
    """Let the files appear under their names, and remove what an earlier run of another size has left."""
    for shard in shards:
        require_visible(shard.partial)
    files = {shard.path for shard in shards}
    is_whole = files == {folder / WHOLE}
    with naming_file(folder / (WHOLE if is_whole else INDEX)):
        if is_whole:
            _merge(folder / WHOLE, shards, token)
        else:
            _rename(folder, shards, entries)
            files.add(folder / INDEX)
        for path in (folder / WHOLE, *folder.glob(SHARDS), folder / INDEX):
            if path not in files:
                path.unlink(missing_ok=True)
        flush_folder(folder)


def _merge(path: Path, shards: Sequence[_Shard], token: str) -> None:
    if len(shards) == 1:
        os.replace(shards[0].partial, path)
        return
    partial = path.with_name(f"{path.name}.{token}{PARTIAL_SUFFIX}")
    with _removing([partial]):
        tensors = {name: tensor for each in shards for name, tensor in read_tensors(each.partial, each.names).items()}
        write_tensors(partial, tensors)
        os.replace(partial, path)


def _rename(folder: Path, shards: Sequence[_Shard], entries: Mapping[str, TensorEntry]) -> None:
    for name in (WHOLE, INDEX):
        (folder / name).unlink(missing_ok=True)  # readers look for these: no mixture of files is ever read
    for shard in shards:
        os.replace(shard.partial, shard.path)
    flush_folder(folder)
    with atomic_file(folder / INDEX) as file:
        file.write(index_bytes(entries))


@contextmanager
def _removing(paths: Sequence[Path]) -> Iterator[None]:
    """Remove files when the block ends, those that are still there."""
    try:
        yield
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink()
