"""The weights of a pipeline with an adapter as files: those of peft, or of the model that the adapter is merged into.

pipeline                                              peft                    merged
...q_proj.base_layer.weight                                                  ┐
...q_proj.lora_A.default.weight, lora_B...            ...q_proj.lora_A.weight ├─► ...q_proj.weight, by peft's merge
lm_head.modules_to_save.default.weight                lm_head.weight         ─► lm_head.weight
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.checkpoints.content import require_same_names
from penstock.checkpoints.weight_format import ConversionUnit, DtypesAndShapes
from penstock.errors import NotSaved
from penstock.hugging_face.adapters import Adapter
from penstock.hugging_face.pretrained_out import PretrainedFormat, SavedFormat
from penstock.hugging_face.undocumented import tied_names
from penstock.hugging_face.undocumented_peft import STEM, merged, share_projections, write_settings
from penstock.models.cutting.placeholders import on_meta
from penstock.models.cutting.points import saved_tensors

PIPELINE = Path("the pipeline")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFormat(SavedFormat):
    """The files of an adapter of peft."""

    adapter: Adapter

    @property
    def stem(self) -> str:
        return STEM

    @property
    def owned_names(self) -> frozenset[str]:
        """The names in the model of which the file has the tensors; of what all layers share, the first."""
        first_names = {file_name: name for name, file_name in reversed(self.adapter.file_names.items())}
        return frozenset(first_names.values())

    def units(self, tensors: DtypesAndShapes) -> list[ConversionUnit]:
        names = [name for name in tensors if name in self.owned_names]
        return [
            ConversionUnit(names=[name], file_types={self.adapter.file_names[name]: tensors[name]}) for name in names
        ]

    def require_all(self, names: Collection[str]) -> None:
        require_same_names(PIPELINE, names, self.owned_names)

    def convert(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.adapter.file_names[name]: tensor for name, tensor in tensors.items()}

    def write_further(self, folder: Path, file_types: DtypesAndShapes) -> None:
        write_settings(self.adapter.peft_model, self.adapter.name, folder)


@dataclass(frozen=True, slots=True, eq=False)
class MergedFormat(PretrainedFormat):
    """The files of a model of transformers that an adapter is merged into; `model` is the model without the adapter."""

    adapter: Adapter = field(kw_only=True)

    @classmethod
    def of(cls, adapter: Adapter, source: Path | None) -> "MergedFormat":
        """Return the format for a model with an adapter, whose tokenizer files are in `source`."""
        whole: Any = on_meta(adapter.peft_model)
        return cls(whole.unload(), source, adapter=adapter)

    def units(self, tensors: DtypesAndShapes) -> list[ConversionUnit]:
        self._require_untied()
        names_by_module: dict[str, list[str]] = {}
        for name in tensors:
            names_by_module.setdefault(self.adapter.module_of(name), []).append(name)
        # Each tensor of the model is made of all that the pipeline has of its module.
        base_types = {
            self.adapter.base_names[name]: tensors[name] for name in tensors if name in self.adapter.base_names
        }
        sources = {
            plain_name: names_by_module[self.adapter.module_of(name)] if self.adapter.module_of(name) else [name]
            for name, plain_name in self.adapter.base_names.items()
            if plain_name in base_types
        }
        return [
            ConversionUnit(
                names=list(dict.fromkeys(source for name in unit["names"] for source in sources[name])),
                file_types=unit["file_types"],
            )
            for unit in PretrainedFormat.units(self, base_types)
        ]

    def model_names(self, names: Collection[str]) -> list[str]:
        """Return the names in the model of tensors that it has without the adapter too."""
        base_names = self.adapter.base_names
        return [base_names[name] for name in names if name in base_names]

    def require_all(self, names: Collection[str]) -> None:
        PretrainedFormat.require_all(self, self.model_names(names))

    def convert(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        plain_tensors: dict[str, Tensor] = {}
        by_module: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            path = self.adapter.module_of(name)
            if path:
                by_module.setdefault(path, {})[name.removeprefix(f"{path}.")] = tensor
            else:
                plain_tensors[name] = tensor
        for path, state in by_module.items():
            merged_tensors = saved_tensors(self._merged(path, state))
            plain_tensors |= {f"{path}.{name}": tensor.detach() for name, tensor in merged_tensors.items()}
        return PretrainedFormat.convert(self, plain_tensors)

    def _merged(self, path: str, state: Mapping[str, Tensor]) -> nn.Module:
        """Return a module with the adapter merged into it, by peft. Raises: NotSaved."""
        module = on_meta(self.adapter.model.get_submodule(path)).to_empty(device="cpu")
        share_projections(module, self.adapter.name, self.adapter.projections)
        module.load_state_dict(state)
        try:
            return merged(module, self.adapter.name)
        except (RuntimeError, ValueError) as error:  # a bias without a place in the model; values that are not finite
            raise NotSaved(
                f"peft cannot merge the adapter into {path!r}: {str(error).rstrip('.')}. Save the adapter alone"
            ) from error

    def _require_untied(self) -> None:
        """Refuse a model that ties a weight which the adapter changes in one of its places. Raises: NotSaved."""
        present_names = {plain_name: name for name, plain_name in self.adapter.base_names.items()}
        for alias, owner in tied_names(self.model).items():
            for name in (alias, owner):
                if self.adapter.module_of(present_names.get(name, name)):
                    raise NotSaved(
                        f"the adapter changes {name!r}, but the model ties {alias!r} to {owner!r}, so that the merged "
                        "model would have the change in both. Save the adapter alone, or untie the model "
                        "(tie_word_embeddings=False) before it is adapted"
                    )
