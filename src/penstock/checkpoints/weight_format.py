"""The names of files of weights, and their tensors for each of a pipeline: itself, or those that others expect.

tensors of a pipeline             unit                 tensors in files
blocks.3.norm.weight              one name             the same                             PLAIN
...mlp.experts.gate_up_proj       one name             ...experts.0.w1.weight, ...          PretrainedFormat
...q_proj, k_proj, v_proj         several names        ...qkv_proj.weight
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from penstock.checkpoints.content import WEIGHTS, Kind

Entries = Mapping[str, Kind]
"""The type and the shape of tensors by name."""


class Unit(TypedDict):
    """Tensors of a pipeline that one rank writes into one file; plain values, which ranks send each other."""

    names: list[str]
    """In the pipeline."""
    saved: dict[str, Kind]
    """Type and shape by name in the file."""


class WeightFormat:
    """Names of files and tensors: the pipeline's own, and nothing but weights. Other formats override what differs."""

    @property
    def stem(self) -> str:
        """The names of the files begin with it, as in STEM.safetensors."""
        return WEIGHTS

    def units(self, tensors: Entries) -> list[Unit]:
        """Return what is saved of the tensors that a rank holds. Raises: CheckpointError."""
        return [Unit(names=[name], saved={name: entry}) for name, entry in tensors.items()]

    def require_all(self, names: Collection[str]) -> None:
        """Refuse what all ranks hold together where something is missing. Raises: CheckpointError."""

    def convert(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors in the file of one unit, by their names there."""
        return tensors

    def write_further(self, folder: Path, saved: Entries) -> None:
        """Make the folder and write what belongs to these weights into it; or do nothing. Raises: OSError, NotSaved."""


PLAIN = WeightFormat()
