"""`checkpoint.json`: everything of a checkpoint but its tensors, and what its files must be like.

    {"sha256":"...","checkpoint":{...}}        the digest is that of the bytes behind "checkpoint":

The digest covers the text itself, so that a changed number in it is found too. The file is written last.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.checkpoints.shards import DIGEST, ITEM_BYTES, FileEntry, pickles_in, require_file_name, require_regular
from penstock.errors import CheckpointError, described

MANIFEST = "checkpoint.json"
FORMAT: Literal["penstock-checkpoint"] = "penstock-checkpoint"
FORMAT_VERSION: Literal[1] = 1
_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'","checkpoint":', b"}\n"
_DIGEST_CHARACTERS = 64

NotNegative = Annotated[int, Field(ge=0)]
FileName = Annotated[str, AfterValidator(require_file_name)]


class UnreadableFormat(CheckpointError):
    """A checkpoint is whole, but not for this version; an older one must not be taken in its place."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TensorEntry(_Part):
    """A tensor, and the file that holds it."""

    dtype: str
    shape: list[NotNegative]
    file: FileName

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ParameterState(_Part):
    """The state that an optimizer keeps of one parameter, by the optimizer's own names."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    """The state that is no tensor."""


class GroupEntry(_Part):
    """A group of an optimizer, over all ranks."""

    options: dict[str, Any]
    parameters: list[str]


class OptimizerEntry(_Part):
    """The optimizers of all ranks, as one."""

    name: str
    groups: list[GroupEntry]
    state: dict[str, ParameterState]


class Manifest(_Part):
    """The content of a checkpoint."""

    format: Literal["penstock-checkpoint"] = FORMAT
    version: Literal[1] = FORMAT_VERSION
    penstock: str
    step: NotNegative
    """The number of the step of the caller's training loop after which this was saved."""
    pipeline_steps: NotNegative
    """Training steps of the pipeline, from which random numbers are drawn where it has a seed."""
    ranks: int
    replicas: int = 1
    """The number of replicas of the pipeline; `random` has the ranks of one replica after those of another."""
    schedule: str
    extra: dict[str, Any]
    random: list[dict[str, Any]]
    """The states of a rank's generators of random numbers, per rank."""
    weights: dict[str, TensorEntry]
    rebuilt: dict[str, int] = {}
    """Sums of the bits of frozen tensors, by name, which are not in the checkpoint, since layers make them again."""
    settings: dict[str, dict[str, Any]] = {}
    """What modules compute by beside their tensors, by name of a module, such as the scale of an adapter."""
    optimizer: OptimizerEntry | None
    files: dict[FileName, FileEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the content of the file."""
    # The standard library's JSON keeps infinities, which a loss in `extra` may well be.
    body = json.dumps(manifest.model_dump(), separators=(",", ":")).encode()
    return _HEAD + _digest(body) + _MIDDLE + body + _TAIL


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, which describes its checkpoint; no file of tensors is opened.

    Raises:
        UnreadableFormat: the manifest is of a newer format, or not of this program.
        CheckpointError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        require_regular(path)
        content = path.read_bytes()
    except FileNotFoundError:
        raise _without_manifest(folder) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    # The file is head, digest, middle, body and tail; the digest is that of the body.
    body_start = len(_HEAD) + _DIGEST_CHARACTERS + len(_MIDDLE)
    digest, body = content[len(_HEAD) : body_start - len(_MIDDLE)], content[body_start : len(content) - len(_TAIL)]
    # The parts put together again must be the file, so that no byte of it is outside of the digest.
    if content != _HEAD + digest + _MIDDLE + body + _TAIL or digest != _digest(body):
        raise CheckpointError(f"{path}: was changed or damaged, its {DIGEST} is not that of its content")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        expected = "an object with the keys of a checkpoint"
        raise CheckpointError(f"{path}: holds {described(fields)}; expected {expected}")
    if fields.get("format") != FORMAT or fields.get("version") != FORMAT_VERSION:
        raise UnreadableFormat(
            f"{path}: has format {fields.get('format')} {fields.get('version')}, written by Penstock "
            f"{fields.get('penstock')}; expected {FORMAT} {FORMAT_VERSION}. Load it with the version that wrote it"
        )
    try:
        return Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_path = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: {field_path}: {first['msg']}") from None


def _without_manifest(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError(f"{folder}: there is no such folder; expected a checkpoint")
    if pickles := pickles_in(folder):
        return holds_pickles(folder, pickles)
    return CheckpointError(f"{folder}: holds no {MANIFEST}, which is written last: the checkpoint is not whole")


def holds_pickles(folder: Path, names: list[str]) -> CheckpointError:
    """Say that pickles are not read."""
    return UnreadableFormat(
        f"{folder}: holds a pickle ({', '.join(names[:3])}), which could run any code when it is read. Penstock reads "
        "safetensors files only: remove it if it does not belong there, or save its tensors as safetensors"
    )


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
