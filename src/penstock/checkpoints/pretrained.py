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
from penstock.checkpoints.loading import LocalWeights, local_weights_of
from penstock.checkpoints.manifest import read_manifest
from penstock.checkpoints.module_settings import require_settings
from penstock.checkpoints.rebuilt import require_rebuilt
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
    """Load the weights at a path into a pipeline; return the file or folder that was read. Every rank calls it.

    `path` is a checkpoint, a run's folder, of which the newest checkpoint is taken, or a file or folder of safetensors.
    Weights are converted to the dtypes of the model. Of tied parameters, that of the owner's name is read.

    Raises:
        CheckpointError: on every rank, and nothing is changed: there are none, or they are of another model.
        PipelineError: a rank is lost.
    """
    control, fails_as = pipeline.control, failing_as(CheckpointError)
    # All ranks go by what rank 0 sees: a rank that sees other files would be in another collective than the others.
    source_name, is_checkpoint = control.together(lambda: _source_of(path), fails_as)[0]
    weights = local_weights_of(pipeline, in_checkpoint=is_checkpoint)
    source = Path(source_name)
    if is_checkpoint:
        checkpoint = find_newest(control, source)
        source = checkpoint.path
        require_rebuilt(pipeline, checkpoint.manifest.rebuilt, source)
        require_settings(pipeline, checkpoint.manifest.settings, source)
    files: dict[str, str] = control.together(lambda: files_of(source), fails_as)[0]
    saved_names_by_rank = control.together(lambda: list(weights.saved_names.values()), fails_as)
    saved_names = {name for names in saved_names_by_rank for name in names}
    tensors = run_together(
        control,
        lambda: _read_tensors(source, files, weights, saved_names),
        num_bytes=size_of(map(Path, set(files.values()))),
        path=source,
    )
    weights.load(pipeline, tensors)
    return source


def _source_of(path: Path) -> tuple[str, bool]:
    """Return the file or folder that a path means, and whether it has checkpoints. Raises: CheckpointError."""
    source = find_weights(path)
    return str(source), bool(candidates(source))


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
    source = find_weights(path)
    checkpoint = newest_readable(source)
    if checkpoint is None:
        shapes = _shapes_of_files(files_of(source))
    else:
        weights = read_manifest(checkpoint).weights
        source, shapes = checkpoint, {name: tuple(entry.shape) for name, entry in weights.items()}
    require_same_names(source, shapes, expected)
    for name, shape in expected.items():
        _require_shape(source, name, shapes[name], shape)


def files_of(source: Path) -> dict[str, str]:
    """Return the file of each tensor, by name. Raises: CheckpointError."""
    if source.is_file():
        return dict.fromkeys(shapes_of(source), str(source))
    indices = sorted(source.glob("*.safetensors.index.json"))
    files = sorted(source.glob("*.safetensors"))
    if len(indices) == 1:
        return {name: str(source / file) for name, file in weight_map(indices[0]).items()}
    if len(files) == 1 and not indices:
        return files_of(files[0])
    pickles = pickles_in(source)
    hint = f" It holds a pickle ({pickles[0]}), which is not read." if pickles else ""
    if not indices and not files:
        raise CheckpointError(
            f"{source}: holds neither weights nor a checkpoint; a run has one as soon as it has saved one.{hint}"
        )
    raise CheckpointError(
        f"{source}: holds {len(indices)} indices and {len(files)} safetensors files; expected one index, or one file."
        f"{hint}"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor that an index lists. Raises: CheckpointError."""
    try:
        require_regular(index)
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: require_file_name(file) for name, file in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read as an index of weights: {error}") from error
    return files


def _read_tensors(
    source: Path, files: Mapping[str, str], weights: LocalWeights, saved_names: set[str]
) -> dict[str, Tensor]:
    """Return this rank's tensors, or its rows of them, by name in files; `saved_names` are those of all ranks.

    Raises: CheckpointError.
    """
    require_same_names(source, files, saved_names)
    expected = {saved_name: weights.tensors[name].shape for name, saved_name in weights.saved_names.items()}
    local_files = {name: files[name] for name in sorted(expected)}
    for name, shape in _shapes_of_files(local_files).items():  # a file that lacks one is named when it is read
        _require_shape(source, name, shape, expected[name])
    return read_files({name: Path(file) for name, file in local_files.items()}, weights.rows())


def _shapes_of_files(files: Mapping[str, str]) -> Shapes:
    tensors_by_file = {file: shapes_of(Path(file)) for file in dict.fromkeys(files.values())}
    return {name: tensors_by_file[file][name][1] for name, file in files.items() if name in tensors_by_file[file]}


def _require_shape(source: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"{source}: is of another model or tokenizer: {name!r} has the shape {shape}; expected {expected}. "
            f"{SAME_MODEL}"
        )
