"""The weights of a transformers model from the folder that it is saved in: each tensor by the name that modules have.

    folder   model.safetensors, or model.safetensors.index.json and its files     headers only, when it is opened
    read     the sources of one tensor ─► converted by the rules of transformers

A rank thus reads the bytes of its own tensors, and the headers of all files.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError, listed, nearest
from penstock.hugging_face.stored import Stored, stored_in_folder
from penstock.hugging_face.undocumented import (
    Conversion,
    conversions,
    is_quantized,
    missing_and_strange,
    reverted,
    tied_names,
)

SAME_MODEL = "Take the config.json that belongs to these files, or files of this model"
"""The fix for weights of another model."""


@dataclass(slots=True, eq=False)
class PretrainedWeights:
    """The tensors of a folder, checked against a model and not yet read; `open` makes one."""

    folder: Path
    model: Any
    """The model without values, on the meta device."""
    bytes_read: int = 0
    """Bytes of headers and tensors that were read so far."""
    _stored: dict[str, Stored] = field(default_factory=dict)
    """The tensors of the files, by name there."""
    _conversions: dict[str, Conversion] = field(default_factory=dict)
    """The conversion of tensors in the files that makes a tensor of the model, by name in the model."""
    _ties: dict[str, str] = field(default_factory=dict)
    _shapes: dict[str, torch.Size] = field(default_factory=dict)
    """The shapes of the model's parameters and saved buffers, by name."""

    @classmethod
    def open(cls, folder: Path, model: Any) -> "PretrainedWeights":
        """Read the headers of a folder, and compare them with the parameters and saved buffers of a model.

        Raises: CheckpointError: no such folder, or its tensors are not those of the model.
        """
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        weights = cls(folder, model, _ties=tied_names(model), _shapes=shapes)
        if is_quantized(model.config):
            raise CheckpointError(
                f"{folder}: its config.json has a quantization_config; expected unquantized weights. Save the model "
                "dequantized, in bfloat16 for instance"
            )
        weights._stored, weights.bytes_read = stored_in_folder(folder)
        model_conversions, unknown_names = conversions(model, weights._stored)
        for conversion in model_conversions:
            weights._conversions |= dict.fromkeys(weights._targets_of(conversion), conversion)
        weights._require_all(unknown_names)
        return weights

    def __contains__(self, name: str) -> bool:
        """Whether the files have a tensor of the model, under its own name or one that it is tied to."""
        return any(alias in self._conversions for alias in self._names_of(name))

    def read(self, name: str) -> Tensor:
        """Read one tensor of the model, by its name there.

        Raises: CheckpointError: no such tensor, or a file changed since it was opened.
        """
        target = self._target(name)
        return self._read(self._conversions[target])[target]

    def fill(self, module: nn.Module) -> None:
        """Copy tensors into the parameters and saved buffers of a module, each cast to the type that it has there.

        The module has the model's names. One tensor of the model is in memory at a time, and its sources. Tensors that
        the files may lack stay as they are.

        Raises: CheckpointError: one of another shape; or as `read`.
        """
        targets_by_conversion: dict[int, tuple[Conversion, list[tuple[str, Tensor]]]] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                continue
            if name not in self and not missing_and_strange(self.model, [name], [])[0]:
                continue
            target = self._target(name)
            conversion = self._conversions[target]
            targets_by_conversion.setdefault(id(conversion), (conversion, []))[1].append((target, value))
        for conversion, targets in targets_by_conversion.values():
            self._fill(conversion, targets)

    def _fill(self, conversion: Conversion, targets: list[tuple[str, Tensor]]) -> None:
        if len(targets) == 1 and self._fill_directly(conversion, *targets[0]):
            return
        tensors = self._read(conversion)
        for target, value in targets:
            if value.shape != tensors[target].shape:
                raise _other_shape(self.folder, target, tensors[target].shape, value.shape)
            with torch.no_grad():
                value.copy_(tensors[target])

    def _fill_directly(self, conversion: Conversion, target: str, value: Tensor) -> bool:
        """Read a tensor into `value` without a copy, if the file has it in this form; return whether it has."""
        stored = self._stored[conversion.sources[0][0]]
        is_alike = stored.dtype == value.dtype and tuple(stored.shape) == tuple(value.shape)
        if conversion.converter is not None or not is_alike or not value.is_contiguous() or value.device.type != "cpu":
            return False
        self.bytes_read += stored.num_bytes
        stored.read_into(value)
        return True

    def _read(self, conversion: Conversion) -> dict[str, Tensor]:
        sources = {name: self._stored[name] for name, _ in conversion.sources}
        self.bytes_read += sum(stored.num_bytes for stored in sources.values())
        tensors = {name: stored.read() for name, stored in sources.items()}
        return conversion.convert(tensors, self.model)

    def _targets_of(self, conversion: Conversion) -> Iterable[str]:
        """Return the names of the model's tensors that a conversion makes, after a run of it on the meta device.

        A conversion makes one or more tensors of the model from one or more tensors of the files.

        Raises:
            CheckpointError: a tensor has another shape than the model's, or sources of the conversion are missing.
        """
        expected_shape = self._shapes[conversion.first]
        sources = {name: self._stored[name].on_meta() for name, _ in conversion.sources}
        source_texts = [f"{name!r} {tuple(tensor.shape)}" for name, tensor in sources.items()]
        if conversion.converter is None and len(source_texts) > 1:
            raise CheckpointError(
                f"{self.folder}: has {conversion.first!r} {len(source_texts)} times, as {', '.join(source_texts)}; "
                f"expected one. {SAME_MODEL}"
            )
        try:
            tensors = conversion.convert(sources, self.model)
        except Exception as error:  # its operations raise what torch raises, or what they like
            self._require_sources(conversion)
            raise CheckpointError(
                f"{self.folder}: is of another model: {conversion.first!r} of shape {tuple(expected_shape)} cannot be "
                f"made of {_listed(source_texts, str)}: {error}. {SAME_MODEL}"
            ) from error
        for name, tensor in tensors.items():
            if name in self._shapes and tensor.shape != self._shapes[name]:
                self._require_sources(conversion)
                made_of = "" if conversion.converter is None else f" made of {_listed(source_texts, str)}"
                raise _other_shape(self.folder, name, tensor.shape, self._shapes[name], made_of)
        return tensors.keys() & self._shapes.keys()

    def _require_sources(self, conversion: Conversion) -> None:
        """Name what a tensor would have to be made of and is not there. Raises: CheckpointError."""
        if conversion.converter is None:
            return
        meta_tensor = torch.empty(self._shapes[conversion.first], device="meta")
        expected = reverted(self.model, {conversion.first: meta_tensor}).keys()
        if expected & self._stored.keys() and expected - self._stored.keys():
            raise _lacks(self.folder, self._stored, expected - self._stored.keys())

    def _require_all(self, strange: Mapping[str, str]) -> None:
        """Refuse files that lack tensors of the model, or have others. Raises: CheckpointError."""
        lacking = [name for name in self._shapes if name not in self]
        missing, unknown = missing_and_strange(self.model, lacking, strange.values())
        if missing:
            raise _lacks(self.folder, self._stored, missing)
        if extra := {name for name, target in strange.items() if target in unknown}:
            hint = nearest(min(extra), self._shapes)
            raise CheckpointError(
                f"{self.folder}: is of another model, which also has {_listed(extra)}.{hint} {SAME_MODEL}"
            )

    def _names_of(self, name: str) -> list[str]:
        """Return all names of a tensor of the model: its owner's, and those that are tied to it."""
        owner = self._ties.get(name, name)
        return [owner, *sorted(alias for alias, owner_name in self._ties.items() if owner_name == owner)]

    def _target(self, name: str) -> str:
        """Return the name under which the files have a tensor. Raises: CheckpointError."""
        present = [alias for alias in self._names_of(name) if alias in self._conversions]
        if not present:
            raise CheckpointError(
                f"{self.folder}: has no tensor for {name!r}.{nearest(name, self._conversions)} Name one of the model"
            )
        self._require_equal(present)
        return present[0]

    def _require_equal(self, names: list[str]) -> None:
        """Refuse tied parameters of which the files have several with other values. Raises: CheckpointError."""
        if len(names) > 1:
            values = {name: self._read(self._conversions[name])[name] for name in names}
            for name in names[1:]:
                require_tied(self.folder, name, names[0], values)


def require_tied(path: Path, name: str, owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tied parameters with other values. Raises: CheckpointError."""
    if not torch.equal(tensors[name], tensors[owner]):
        raise CheckpointError(
            f"{path}: {name!r} and {owner!r} have other values, but the model ties them. Set tie_word_embeddings to "
            "false in its config.json"
        )


def _lacks(folder: Path, stored_names: Iterable[str], names: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: is of another model: it has no {_listed(names)}.{nearest(min(names), stored_names)} {SAME_MODEL}"
    )


def _other_shape(
    folder: Path, name: str, shape: Iterable[int], expected: Iterable[int], of: str = ""
) -> CheckpointError:
    return CheckpointError(
        f"{folder}: is of another model or tokenizer: {name!r}{of} has the shape {tuple(shape)}; expected "
        f"{tuple(expected)}. {SAME_MODEL}"
    )


def _listed(names: Iterable[str], quoted: Callable[[str], str] = repr) -> str:
    return listed(sorted(names), quoted=quoted)
