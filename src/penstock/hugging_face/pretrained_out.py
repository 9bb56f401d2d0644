"""Weights of a pipeline as transformers saves a model: what `from_pretrained` loads, with the names that it expects.

model.safetensors, or model-00001-of-00003.safetensors, ... and model.safetensors.index.json
config.json, generation_config.json                                    of the model
tokenizer.json and the like                                            copies of the folder that the model came from
"""

import copy
import math
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.agreement import failing_as, require_equal_on_ranks
from penstock.checkpoints.content import SAME_MODEL, require_same_names
from penstock.checkpoints.pretrained import files_of, find_weights
from penstock.checkpoints.shards import DTYPE_NAMES, DTYPES, read_tensors, shapes_of
from penstock.checkpoints.verification import newest_readable, verify
from penstock.checkpoints.weight_files import save_tensors, save_weights
from penstock.checkpoints.weight_format import ConversionUnit, DtypesAndShapes, WeightFormat
from penstock.errors import CheckpointError, NotSaved, listed, nearest
from penstock.execute.transport.calls import collective
from penstock.files import naming_storage
from penstock.hugging_face.source import names_beside_class
from penstock.hugging_face.undocumented import is_quantized, reverted, tied_names, unsaved_names
from penstock.hugging_face.weights_in import require_tied
from penstock.models.cutting.points import saved_tensors
from penstock.pipeline import Pipeline

PROCESSOR_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "source.spm", "target.spm"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""The files that tokenizers and processors of transformers save and read."""

MOST_NAMES = 3
"""Names that a message about a model with adapters lists."""


@collective
def save_as(pipeline: Pipeline, folder: Path, format: "SavedFormat") -> None:
    """Write the weights of all ranks in this format, into a folder that is made. Raises: as `save_pretrained`."""
    control = pipeline.control

    def make_folder() -> None:
        format.require_savable(folder)
        with naming_storage(folder):
            folder.mkdir(parents=True, exist_ok=True)

    formats = control.together(lambda: type(format).__name__)
    require_equal_on_ranks("format (merged)", formats, folder, control.names)
    # Only rank 0 makes the folder; if that fails, NotSaved is raised on every rank.
    control.on_rank_0(make_folder, failing_as(NotSaved))
    save_weights(folder, pipeline, format)


def convert_weights(path: Path, folder: Path, model: Any, source: Path, format: "SavedFormat | None" = None) -> Path:
    """Write weights into a folder that transformers' `from_pretrained` loads; return the path that they were read from.

    `format` says the files, by default those of `model`.

    `path` is a checkpoint, a run's folder, or a file or folder of safetensors, with the names of `model`, which is on
    the meta device. Configuration and tokenizer files are copied from `source`. Files are written one after another: a
    tensor is in memory when it is written, or converted until its file is.

    Raises:
        NotSaved: a file cannot be written.
        CheckpointError: there are no weights, they are damaged, or of another model. The folder is as it was.
    """
    source_path = find_weights(path)
    checkpoint = newest_readable(source_path)
    if checkpoint is not None:
        verify(checkpoint)
        source_path = checkpoint
    files = files_of(source_path)
    entries = {
        name: (dtype, list(shape))
        for file in sorted(set(files.values()))
        for name, (dtype, shape) in shapes_of(Path(file)).items()
        if files.get(name) == file
    }
    missing = files.keys() - entries.keys()
    if missing:
        raise CheckpointError(f"{source_path}: has no {min(missing)!r}, which its index lists; get the files anew")

    def read(names: Collection[str]) -> dict[str, Tensor]:
        return {name: tensor for name in names for name, tensor in read_tensors(Path(files[name]), [name]).items()}

    # Of tied parameters one is written; if the files have both, they must be equal.
    for name, owner in tied_names(model).items():
        if name in entries and owner in entries:
            require_tied(source_path, name, owner, read([name, owner]))
            del entries[name]
    save_tensors(folder, entries, read, format or PretrainedFormat(model, source, source_path))
    return source_path


class SavedFormat(WeightFormat):
    """The files of a folder that `save_pretrained` writes."""

    def require_savable(self, folder: Path) -> None:
        """Refuse a model that these files cannot hold. Raises: NotSaved."""


@dataclass(frozen=True, slots=True, eq=False)
class PretrainedFormat(SavedFormat):
    """The files of a transformers model."""

    model: Any
    """The model, which may be on the meta device: it says the names, the configuration and the form of the files."""
    source: Path | None = None
    """The folder from which files of the tokenizer and the processor are copied, if any."""
    source_words: Path = Path("the pipeline")
    """The source of the weights, as messages about wrong names or shapes call it."""
    shared_names: Collection[str] = ()
    """Parameters that a layer has under several names; those that the model ties are left out."""

    @property
    def stem(self) -> str:
        return "model"

    def units(self, tensors: DtypesAndShapes) -> list[ConversionUnit]:
        if is_quantized(self.model.config):
            raise CheckpointError(
                f"{self.source_words}: the config of the model has a quantization_config, but its weights are not "
                "quantized. Take a config.json without it"
            )
        state = saved_tensors(self.model)
        ties, unsaved = tied_names(self.model), unsaved_names(self.model)
        shared_ties = ties.keys() & set(self.shared_names)
        tensors = {name: entry for name, entry in tensors.items() if name not in shared_ties}
        for name, (dtype, shape) in tensors.items():
            self._require_known(name, state, ties)
            self._require_alike(name, dtype, tuple(shape), tuple(state[name].shape))
        metas = {name: _on_meta(*entry) for name, entry in tensors.items() if name not in unsaved}
        return [
            _unit(self.model, {name: metas[name] for name in names}) for names in _groups_of_names(self.model, metas)
        ]

    def require_savable(self, folder: Path) -> None:
        """Refuse a model that has more than its class makes. Raises: NotSaved."""
        foreign_names = names_beside_class(self.model)
        if foreign_names:
            raise NotSaved(
                f"{folder}: the model has {listed(foreign_names, MOST_NAMES, quoted=repr)}, which "
                f"{type(self.model).__name__} does not have, so that from_pretrained would leave these out and draw "
                "others at random. Adapters are saved where from_transformers is given the model with peft's wrapper "
                "around it; or train a model that they are merged into (merge_and_unload() of peft)"
            )

    def model_names(self, names: Collection[str]) -> list[str]:
        """Return the names in the model for names of a pipeline's tensors."""
        return list(names)

    def require_all(self, names: Collection[str]) -> None:
        model_names = saved_tensors(self.model).keys() - tied_names(self.model).keys() - unsaved_names(self.model)
        require_same_names(self.source_words, names, model_names)

    def convert(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return reverted(self.model, tensors)

    def write_further(self, folder: Path, file_types: DtypesAndShapes) -> None:
        folder.mkdir()
        config = copy.deepcopy(self.model.config)
        config.architectures = [type(self.model).__name__]
        config.dtype = _main_type(file_types)  # transformers loads all weights in it
        config.save_pretrained(folder)
        if self.model.can_generate():
            self._write_generation_config(folder)
        if self.source is not None:
            for path in (path for pattern in PROCESSOR_FILES for path in self.source.glob(pattern)):
                shutil.copyfile(path, folder / path.name)

    def _write_generation_config(self, folder: Path) -> None:
        try:
            self.model.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise NotSaved(
                f"generation_config.json: transformers refuses it: {error}. Correct the generation_config of the model"
            ) from error

    def _require_known(self, name: str, state: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
        if name in ties:
            raise CheckpointError(
                f"{self.source_words}: has {name!r} besides {ties[name]!r}, but the model ties them. Tie them, or set "
                "tie_word_embeddings to false in its config.json"
            )
        if name not in state:
            raise CheckpointError(
                f"{self.source_words}: is of another model, which also has {name!r}.{nearest(name, state)} Its names "
                "must be those of the model in transformers"
            )

    def _require_alike(self, name: str, dtype: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.source_words}: {name!r} has the type {dtype}; expected {', '.join(DTYPES)}")
        if shape != expected:
            raise CheckpointError(
                f"{self.source_words}: is of another model: {name!r} has the shape {shape}; expected {expected}. "
                f"{SAME_MODEL}"
            )


def _groups_of_names(model: Any, metas: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of tensors in groups that become the same tensors of files; most are alone."""
    groups: dict[str, list[str]] = {}
    for name, tensor in metas.items():
        file_names = list(reverted(model, {name: tensor}))
        group = next((groups[file_name] for file_name in file_names if file_name in groups), [])
        group.append(name)
        groups |= dict.fromkeys(file_names, group)
    return list({id(group): group for group in groups.values()}.values())


def _unit(model: Any, metas: Mapping[str, Tensor]) -> ConversionUnit:
    file_tensors = reverted(model, metas)
    return ConversionUnit(
        names=list(metas),
        file_types={name: (DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in file_tensors.items()},
    )


def _on_meta(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def _main_type(file_types: DtypesAndShapes) -> str:
    """Return torch's name of the floating point type that most values have."""
    counts: Counter[str] = Counter()
    for dtype, shape in file_types.values():
        counts[dtype] += math.prod(shape) if DTYPES[dtype].is_floating_point else 0
    return str(DTYPES[counts.most_common(1)[0][0]]).removeprefix("torch.")
