"""Weights to begin with: of another run, or of another program, in the layouts of safetensors files.

weights.safetensors                                     one file
folder with NAME.safetensors.index.json                 the Hugging Face layout, files of one index
folder with one *.safetensors                           likewise, without an index
folder step-N, a folder of such                         the newest that verifies
run folder                                              its weights, else its newest checkpoint that verifies
"""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from penstock.checkpoints.agreement import failing_as, run_together
from penstock.checkpoints.content import SAME_MODEL, require_same_names
from penstock.checkpoints.loading import OwnTensors, own_tensors
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.shards import pickles_in, read_files, require_file_name, require_regular, shapes_of
from penstock.checkpoints.verification import candidates, find_newest, newest_readable, size_of
from penstock.checkpoints.weight_files import INDEX, WHOLE
from penstock.errors import CheckpointError
from penstock.execute.transport.calls import collective
from penstock.pipeline import Pipeline

WITHIN_RUNS = "checkpoints"
Shapes = Mapping[str, tuple[int, ...]]


@collective
def load_weights(path: Path, pipeline: Pipeline) -> Path:
    """Load the weights that a path names; return the file or folder they came from. Every rank calls it.

    They are converted to the types of the model. Of tied parameters, the owner's is looked for.

    Raises:
        CheckpointError: on every rank, and nothing is changed: there are none, or they are of another model.
        PipelineError: a rank is lost.
    """
    control, fails_as = pipeline.control, failing_as(CheckpointError)
    own = own_tensors(pipeline)
    # By what rank 0 sees in both cases: a rank that sees other files would be in another collective.
    found_path, is_checkpoint = control.together(lambda: _place_of(path), fails_as)[0]
    where = Path(found_path)
    if is_checkpoint:
        where = find_newest(control, where).path
    files: dict[str, str] = control.together(lambda: files_of(where), fails_as)[0]
    everyone = control.together(lambda: list(own.names.values()), fails_as)
    wanted = {name for names in everyone for name in names}
    found = run_together(
        control,
        lambda: _read(where, files, own, wanted),
        num_bytes=size_of(map(Path, set(files.values()))),
        what=str(where),
    )
    own.load(pipeline, found)
    return where


def _place_of(path: Path) -> tuple[str, bool]:
    """Return what `find_weights` does, and whether it has checkpoints. Raises: CheckpointError."""
    where = find_weights(path)
    return str(where), bool(candidates(where))


def find_weights(path: Path) -> Path:
    """Return the file or folder that a path means. Raises: CheckpointError, where there is none."""
    if path.is_file() and path.suffix == ".safetensors":
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path}: is no safetensors file; Penstock reads no other files of weights, and no pickle"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder; expected weights, or a run folder")
    within = path / WITHIN_RUNS
    if candidates(path):
        return path
    if (path / WHOLE).is_file():
        return path / WHOLE
    return path if (path / INDEX).is_file() or not candidates(within) else within


def require_weights(path: Path, expected: Shapes) -> None:
    """Refuse a path that names no weights, or those of another model; no tensor is read. Raises: CheckpointError."""
    where = find_weights(path)
    checkpoint = newest_readable(where)
    if checkpoint is None:
        found = _shapes_of_files(files_of(where))
    else:
        weights = read_manifest(checkpoint).weights
        where, found = checkpoint, {name: tuple(entry.shape) for name, entry in weights.items()}
    require_same_names(where, found, expected)
    for name, shape in expected.items():
        _require_shape(where, name, found[name], shape)


def files_of(where: Path) -> dict[str, str]:
    """Return the file of each tensor, by name. Raises: CheckpointError."""
    if where.is_file():
        return dict.fromkeys(shapes_of(where), str(where))
    indices = sorted(where.glob("*.safetensors.index.json"))
    files = sorted(where.glob("*.safetensors"))
    if len(indices) == 1:
        return {name: str(where / file) for name, file in weight_map(indices[0]).items()}
    if len(files) == 1 and not indices:
        return files_of(files[0])
    pickles = pickles_in(where)
    hint = f" It holds a pickle ({pickles[0]}), which is not read." if pickles else ""
    if not indices and not files:
        raise CheckpointError(
            f"{where}: holds neither weights nor a checkpoint; a run has one as soon as it has saved one.{hint}"
        )
    raise CheckpointError(
        f"{where}: holds {len(indices)} indices and {len(files)} safetensors files; expected one index, or one file."
        f"{hint}"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor that an index lists. Raises: CheckpointError."""
    try:
        require_regular(index)
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: require_file_name(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read as an index of weights: {error}") from error
    return files


def _read(where: Path, files: Mapping[str, str], own: OwnTensors, wanted: set[str]) -> dict[str, Tensor]:
    """Return this rank's tensors, or its rows of them, by their names in files. Raises: CheckpointError."""
    require_same_names(where, files, wanted)
    expected = {saved: own.held[name].shape for name, saved in own.names.items()}
    wanted_files = {name: files[name] for name in sorted(expected)}
    for name, shape in _shapes_of_files(wanted_files).items():  # a file that lacks one is named when it is read
        _require_shape(where, name, shape, expected[name])
    return read_files({name: Path(file) for name, file in wanted_files.items()}, own.rows())


def _shapes_of_files(files: Mapping[str, str]) -> Shapes:
    found = {file: shapes_of(Path(file)) for file in dict.fromkeys(files.values())}
    return {name: found[file][name][1] for name, file in files.items() if name in found[file]}


def _require_shape(where: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{where}: is of another model or tokenizer: {name!r} has the shape {found}; expected {expected}. "
            f"{SAME_MODEL}"
        )
