"""The weights of a training as safetensors files, which any reader of that format opens.

    up to 5 GB   weights.safetensors                          the same bytes on any number of ranks
    more         weights-00001-of-00003.safetensors, ...      each rank writes its own tensors, at most 5 GB a file
                 weights.safetensors.index.json               which file holds which tensor: the Hugging Face layout

Threads write, and ranks gather meanwhile: a disk may take any time, and a lost rank is noticed within the deadline.
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

from penstock.checkpoints.agreement import run_together
from penstock.checkpoints.content import WEIGHTS, file_name, gather_content, owned_names
from penstock.checkpoints.manifest import TensorEntry
from penstock.checkpoints.shards import naming_file, read_tensors, require_visible, write_tensors
from penstock.checkpoints.staging import Staging, stage
from penstock.checkpoints.weight_format import PLAIN, ConversionUnit, DtypesAndShapes, WeightFormat
from penstock.checkpoints.weight_units import units_by_rank
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
    """The file into which it is written first, under another name."""
    rank: int
    """The rank that writes it."""
    units: tuple[ConversionUnit, ...]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by name in the file."""
        return {name: entry for unit in self.units for name, entry in _entries(unit, self.path.name).items()}

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.units))


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one save, the same on every rank."""

    folder: Path
    format: WeightFormat
    token: str
    """A text that no other save has: part of the name of every file that is not whole yet."""
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
                file_tensors = self.format.convert(read(unit["names"]))
                tensors |= {name: tensor.contiguous() for name, tensor in file_tensors.items()}
            write_tensors(shard.partial, tensors)

    def write_further(self) -> None:
        """Write the files beside the weights, such as a config, into a folder under another name."""
        units = [unit for shard in self.shards for unit in shard.units]
        file_types = {name: entry for unit in units for name, entry in unit["file_types"].items()}
        with naming_file(self.folder):
            self.format.write_further(self.further, file_types)


@collective
def save_weights(folder: Path, pipeline: Pipeline, format: WeightFormat = PLAIN) -> None:
    """Write all parameters and saved buffers of all ranks into a folder that all of them see; every rank calls it.

    Each rank writes files of its own tensors under temporary names; when all are written, rank 0 gives them their
    names. So the files appear whole or not at all. Of tied parameters the first name is saved, once. `format` says the
    names and the form of the files.

    Raises:
        NotSaved: on every rank, if a file cannot be written, a tensor's type has no place in the files, or the format
            is for another model.
        PipelineError: if a rank is lost meanwhile.
    """
    control = pipeline.control
    token = str(control.on_rank_0(lambda: uuid4().hex))
    # All ranks learn which tensors each rank has, and choose the same files; `token` marks the temporary names of this
    # save.
    content, descriptions, _ = gather_content(pipeline, None)
    units = units_by_rank(pipeline, format, descriptions, owned_names(descriptions))
    files = _planned_files(folder, format, units, token)
    num_bytes = sum(shard.num_bytes for shard in files.shards)
    local_shards = [shard for shard in files.shards if shard.rank == control.rank]
    staged: Mapping[str, Tensor] = {}
    if any(description["by_rows"] for description in descriptions):  # each replica holds some rows of these tensors
        names_by_rank = [frozenset(name for unit in rank_units for name in unit["names"]) for rank_units in units]
        staged = stage(Staging(), pipeline, content, names_by_rank)[WEIGHTS]

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        # What is not staged is copied, since the library refuses tensors that share memory.
        copies = {name: content.weights[name].local.to("cpu", copy=True) for name in names if name not in staged}
        return {name: staged[name] if name in staged else copies[name].contiguous() for name in names}

    def write() -> None:
        for shard in local_shards:
            files.write(shard, read)
        if control.rank == 0:
            files.write_further()

    def publish() -> None:
        if control.rank == 0:
            _publish(files)

    with _removing_leftovers(files.further, *(shard.partial for shard in local_shards)):
        # No rank gives files their names before all ranks have written theirs.
        for action in (write, publish):
            run_together(control, action, num_bytes=num_bytes, path=folder, error_type=NotSaved)


def save_tensors(
    folder: Path, tensors: DtypesAndShapes, read: Callable[[Sequence[str]], Mapping[str, Tensor]], format: WeightFormat
) -> None:
    """Write tensors as `save_weights` does, in one process without a pipeline; `read` returns some of them by name.

    Raises: NotSaved: a file cannot be written. CheckpointError: the format is for another model, or what `read` raises.
    """
    units = format.units(tensors)
    format.require_all([name for unit in units for name in unit["names"]])
    files = _planned_files(folder, format, [units], uuid4().hex)
    with _removing_leftovers(files.further, *(shard.partial for shard in files.shards)):
        for shard in files.shards:
            files.write(shard, read)
        files.write_further()
        _publish(files)


@collective
def require_saveable(pipeline: Pipeline) -> int:
    """Return the bytes of the weights of all ranks, if files can hold them; every rank calls it.

    Raises: NotSaved, on every rank.
    """
    _, descriptions, _ = gather_content(pipeline, None)
    entries = {name: entry for description in descriptions for name, entry in description["weights"].items()}
    return sum(map(_num_bytes, PLAIN.units(entries)))


def index_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the content of an index of these tensors."""
    total = sum(entry.num_bytes for entry in entries.values())
    files = {name: entry.file for name, entry in entries.items()}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    return json.dumps(index, indent=1).encode()


def _planned_files(folder: Path, format: WeightFormat, units: Sequence[Sequence[ConversionUnit]], token: str) -> _Files:
    """Return the files of all ranks, the same on every rank; `units` has those that each rank saves.

    Small weights become one file: the shards of all ranks then have the same path, and `_merge` puts them together.
    """
    units_by_shard = [
        (rank, shard_units) for rank, rank_units in enumerate(units) for shard_units in _units_by_shard(rank_units)
    ]
    is_one_file = sum(_num_bytes(unit) for _, shard_units in units_by_shard for unit in shard_units) <= FILE_BYTES
    shards = []
    for number, (rank, shard_units) in enumerate(units_by_shard or [(0, [])]):
        name = file_name(format.stem, number, len(units_by_shard))
        partial = folder / f"{name}.{token}{PARTIAL_SUFFIX}"
        path = folder / (whole_name(format.stem) if is_one_file else name)
        shards.append(_Shard(path, partial, rank, tuple(shard_units)))
    return _Files(folder, format, token, tuple(shards))


def _units_by_shard(units: Sequence[ConversionUnit]) -> list[list[ConversionUnit]]:
    """Return the units of one rank by shard, in the order of their names, at most `FILE_BYTES` in each."""
    shards: list[list[ConversionUnit]] = []
    shard_bytes = 0
    for unit in sorted(units, key=lambda unit: unit["names"]):
        num_bytes = _num_bytes(unit)
        if not shards or shard_bytes + num_bytes > FILE_BYTES:  # a larger unit has a shard to itself
            shards.append([])
            shard_bytes = 0
        shards[-1].append(unit)
        shard_bytes += num_bytes
    return shards


def _entries(unit: ConversionUnit, file: str) -> dict[str, TensorEntry]:
    kinds = unit["file_types"].items()
    return {name: TensorEntry(dtype=dtype, shape=shape, file=file) for name, (dtype, shape) in kinds}


def _num_bytes(unit: ConversionUnit) -> int:
    """Return the bytes of a unit's tensors in files."""
    return sum(entry.num_bytes for entry in _entries(unit, WHOLE).values())


def _publish(files: _Files) -> None:
    """Give the files their names, and remove the files of an earlier save that had more or fewer of them."""
    folder, stem = files.folder, files.format.stem
    for shard in files.shards:
        require_visible(shard.partial)
    paths = {shard.path for shard in files.shards}
    whole_path, index_path = folder / whole_name(stem), folder / index_name(stem)
    with naming_file(whole_path if paths == {whole_path} else index_path):
        for path in sorted(files.further.glob("*")):
            flush(path)
            os.replace(path, folder / path.name)
        if paths == {whole_path}:
            _merge(whole_path, files)
        else:
            _rename(files)
            paths.add(index_path)
        for path in (whole_path, *folder.glob(f"{stem}-*-of-*.safetensors"), index_path):
            if path not in paths:
                path.unlink(missing_ok=True)
        flush(folder)


def _merge(path: Path, files: _Files) -> None:
    """Make one file of the shards of all ranks."""
    if len(files.shards) == 1:
        os.replace(files.shards[0].partial, path)
        return
    partial = path.with_name(f"{path.name}.{files.token}{PARTIAL_SUFFIX}")
    with _removing_leftovers(partial):
        parts = [read_tensors(shard.partial, shard.entries) for shard in files.shards]
        write_tensors(partial, {name: tensor for part in parts for name, tensor in part.items()})
        os.replace(partial, path)


def _rename(files: _Files) -> None:
    """Make each shard a file of its own, and write their index, which comes last: it names files that are there."""
    folder, stem = files.folder, files.format.stem
    for name in (whole_name(stem), index_name(stem)):
        (folder / name).unlink(missing_ok=True)  # readers look for these, so none reads old and new files together
    for shard in files.shards:
        os.replace(shard.partial, shard.path)
    flush(folder)
    entries = {name: entry for shard in files.shards for name, entry in shard.entries.items()}
    with atomic_file(folder / index_name(stem)) as file:
        file.write(index_bytes(entries))


@contextmanager
def _removing_leftovers(*paths: Path) -> Iterator[None]:
    """Remove these files and folders when the block ends, as far as they are still there."""
    try:
        yield
    finally:
        for path in paths:
            rmtree(path, ignore_errors=True)  # leaves files alone
            with suppress(OSError):
                path.unlink()
