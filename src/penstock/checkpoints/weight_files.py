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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from torch import Tensor

from penstock.checkpoints.agreement import failing_as, run_together
from penstock.checkpoints.content import (
    WEIGHTS,
    Described,
    file_name,
    gather_content,
    owned_names,
)
from penstock.checkpoints.held import Held
from penstock.checkpoints.manifest import TensorEntry
from penstock.checkpoints.shards import naming_file, read_tensors, require_visible, write_tensors
from penstock.checkpoints.staging import Staging, stage
from penstock.checkpoints.weight_format import PLAIN, Entries, Unit, WeightFormat
from penstock.errors import NotSaved
from penstock.execute.transport.calls import collective
from penstock.files import PARTIAL_SUFFIX, atomic_file, flush
from penstock.pipeline import Pipeline


def whole_name(stem: str) -> str:
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    return f"{whole_name(stem)}.index.json"


WHOLE = whole_name(WEIGHTS)
INDEX = index_name(WEIGHTS)
SHARDS = f"{WEIGHTS}-*-of-*.safetensors"
FILE_BYTES = 5_000_000_000
"""The most tensors in one file, unless a single one is larger; Hugging Face libraries have the same rule."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """The tensors that one rank writes at once."""

    path: Path
    """The file of which it becomes a part, or all."""
    partial: Path
    """Where it is written."""
    rank: int
    units: tuple[Unit, ...]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by name in the file."""
        return {name: entry for unit in self.units for name, entry in _entries(unit, self.path.name).items()}

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.units))


@dataclass(frozen=True, slots=True)
class _Files:
    """All that is written of one model, the same on every rank."""

    folder: Path
    format: WeightFormat
    token: str
    """Of this save: part of the name of every file that is not whole yet."""
    shards: tuple[_Shard, ...]

    @property
    def further(self) -> Path:
        """The folder in which files beside the weights are written first."""
        return self.folder / f".{self.format.stem}.{self.token}{PARTIAL_SUFFIX}"

    def write(self, shard: _Shard, read: Callable[[Sequence[str]], Mapping[str, Tensor]]) -> None:
        """Write one file of tensors under its other name; `read` returns the whole tensors of one unit."""
        with naming_file(shard.path):
            tensors: dict[str, Tensor] = {}
            for unit in shard.units:
                found = self.format.convert(read(unit["names"]))
                tensors |= {name: tensor.contiguous() for name, tensor in found.items()}
            write_tensors(shard.partial, tensors)

    def write_further(self) -> None:
        units = [unit for shard in self.shards for unit in shard.units]
        saved = {name: entry for unit in units for name, entry in unit["saved"].items()}
        with naming_file(self.folder):
            self.format.write_further(self.further, saved)


@collective
def save_weights(folder: Path, pipeline: Pipeline, format: WeightFormat = PLAIN) -> None:
    """Write all parameters and saved buffers of all ranks into a folder that all of them see; every rank calls it.

    The files appear when they are whole, or not at all. Of tied parameters the first name is saved, once.

    Raises:
        NotSaved: on every rank, if a file cannot be written, a tensor's type has no place in the files, or the format
            is for another model.
        PipelineError: if a rank is lost meanwhile.
    """
    control = pipeline.control
    token = str(control.on_rank_0(lambda: uuid4().hex))
    content, everyone, _ = gather_content(pipeline, None)
    units = _owned_units(pipeline, format, everyone)
    files = _files(folder, format, units, token)
    num_bytes = sum(shard.num_bytes for shard in files.shards)
    own = [shard for shard in files.shards if shard.rank == control.rank]
    whole: Mapping[str, Tensor] = {}
    if any(theirs["by_rows"] for theirs in everyone):  # tensors of which each replica holds some rows
        owned = [frozenset(name for unit in theirs for name in unit["names"]) for theirs in units]
        whole = stage(Staging(), pipeline, content, owned)[WEIGHTS]

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: whole[name] if name in whole else _copy(content.weights[name]) for name in names}

    def write() -> None:
        for shard in own:
            files.write(shard, read)
        if control.rank == 0:
            files.write_further()

    def publish() -> None:
        if control.rank == 0:
            _publish(files)

    with _removing(files.further, *(shard.partial for shard in own)):
        for action in (write, publish):
            run_together(control, action, num_bytes=num_bytes, what=str(folder), error_type=NotSaved)


def save_tensors(
    folder: Path, tensors: Entries, read: Callable[[Sequence[str]], Mapping[str, Tensor]], format: WeightFormat
) -> None:
    """Write tensors as `save_weights` does, in one process without a pipeline; `read` returns some of them by name.

    Raises: NotSaved: a file cannot be written. CheckpointError: the format is for another model, or what `read` raises.
    """
    units = format.units(tensors)
    format.require_all([name for unit in units for name in unit["names"]])
    files = _files(folder, format, [units], uuid4().hex)
    with _removing(files.further, *(shard.partial for shard in files.shards)):
        for shard in files.shards:
            files.write(shard, read)
        files.write_further()
        _publish(files)


@collective
def require_saveable(pipeline: Pipeline) -> int:
    """Return how many bytes the weights of all ranks are, if files can hold them; every rank calls it.

    Raises: NotSaved, on every rank.
    """
    _, everyone, _ = gather_content(pipeline, None)
    entries = {name: entry for theirs in everyone for name, entry in theirs["weights"].items()}
    return sum(map(_num_bytes, PLAIN.units(entries)))


def index_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the content of an index of these tensors."""
    total = sum(entry.num_bytes for entry in entries.values())
    files = {name: entry.file for name, entry in entries.items()}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    return json.dumps(index, indent=1).encode()


def _owned_units(pipeline: Pipeline, format: WeightFormat, everyone: Sequence[Described]) -> list[list[Unit]]:
    """Return what each rank saves: a unit goes to the rank that owns its first name."""
    control = pipeline.control
    own = everyone[control.rank]["weights"]
    units: list[list[Unit]] = control.together(lambda: format.units(own), failing_as(NotSaved))
    owned = owned_names(everyone)
    found = [[unit for unit in theirs if unit["names"][0] in owned[rank]] for rank, theirs in enumerate(units)]
    control.together(lambda: _require_all(format, found), failing_as(NotSaved))
    return found


def _require_all(format: WeightFormat, units: Sequence[Sequence[Unit]]) -> None:
    """Refuse units of all ranks that lack a tensor, or of which two make the same one. Raises: CheckpointError."""
    format.require_all([name for theirs in units for unit in theirs for name in unit["names"]])
    makers: dict[str, list[str]] = {}
    for unit in (unit for theirs in units for unit in theirs):
        for name in unit["saved"]:
            if name in makers:
                raise NotSaved(
                    f"{unit['names'][0]!r} and {makers[name][0]!r} are saved as one tensor, {name!r}, but no rank has "
                    "both; let one stage hold them"
                )
            makers[name] = unit["names"]


def _files(folder: Path, format: WeightFormat, units: Sequence[Sequence[Unit]], token: str) -> _Files:
    """Return the files of all ranks, the same on every rank; `units` are those of each."""
    found: list[tuple[int, list[Unit]]] = []
    for rank, theirs in enumerate(units):
        several: list[Unit] = []
        held = 0
        for unit in sorted(theirs, key=lambda unit: unit["names"]):
            num_bytes = _num_bytes(unit)
            if several and held + num_bytes > FILE_BYTES:
                found.append((rank, several))
                several, held = [], 0
            several.append(unit)
            held += num_bytes
        found += [(rank, several)] if several else []
    is_whole = sum(_num_bytes(unit) for _, several in found for unit in several) <= FILE_BYTES
    shards = []
    for number, (rank, several) in enumerate(found or [(0, [])]):
        name = file_name(format.stem, number, len(found))
        partial = folder / f"{name}.{token}{PARTIAL_SUFFIX}"
        path = folder / (whole_name(format.stem) if is_whole else name)
        shards.append(_Shard(path, partial, rank, tuple(several)))
    return _Files(folder, format, token, tuple(shards))


def _entries(unit: Unit, file: str) -> dict[str, TensorEntry]:
    kinds = unit["saved"].items()
    return {name: TensorEntry(dtype=dtype, shape=shape, file=file) for name, (dtype, shape) in kinds}


def _num_bytes(unit: Unit) -> int:
    """Bytes of all that is saved, in any file."""
    return sum(entry.num_bytes for entry in _entries(unit, WHOLE).values())


def _copy(held: Held) -> Tensor:
    """Return a contiguous copy on the CPU: the library refuses tensors that share memory."""
    return held.local.to("cpu", copy=True).contiguous()


def _publish(files: _Files) -> None:
    """Let the files appear under their names, and remove what an earlier run of another size has left."""
    folder, stem = files.folder, files.format.stem
    for shard in files.shards:
        require_visible(shard.partial)
    names = {shard.path for shard in files.shards}
    whole, index = folder / whole_name(stem), folder / index_name(stem)
    with naming_file(whole if names == {whole} else index):
        for path in sorted(files.further.glob("*")):
            flush(path)
            os.replace(path, folder / path.name)
        if names == {whole}:
            _merge(whole, files)
        else:
            _rename(files)
            names.add(index)
        for path in (whole, *folder.glob(f"{stem}-*-of-*.safetensors"), index):
            if path not in names:
                path.unlink(missing_ok=True)
        flush(folder)


def _merge(path: Path, files: _Files) -> None:
    if len(files.shards) == 1:
        os.replace(files.shards[0].partial, path)
        return
    partial = path.with_name(f"{path.name}.{files.token}{PARTIAL_SUFFIX}")
    with _removing(partial):
        parts = [read_tensors(shard.partial, shard.entries) for shard in files.shards]
        write_tensors(partial, {name: tensor for part in parts for name, tensor in part.items()})
        os.replace(partial, path)


def _rename(files: _Files) -> None:
    folder, stem = files.folder, files.format.stem
    for name in (whole_name(stem), index_name(stem)):
        (folder / name).unlink(missing_ok=True)  # readers look for these: no mixture of files is ever read
    for shard in files.shards:
        os.replace(shard.partial, shard.path)
    flush(folder)
    entries = {name: entry for shard in files.shards for name, entry in shard.entries.items()}
    with atomic_file(folder / index_name(stem)) as file:
        file.write(index_bytes(entries))


@contextmanager
def _removing(*paths: Path) -> Iterator[None]:
    """Remove files and folders when the block ends, those that are still there."""
    try:
        yield
    finally:
        for path in paths:
            rmtree(path, ignore_errors=True)  # leaves files alone
            with suppress(OSError):
                path.unlink()
