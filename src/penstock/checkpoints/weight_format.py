"""The names of files of weights, and how the tensors of a pipeline become tensors of files: unchanged, or converted.

tensors of a pipeline             unit                 tensors in files
blocks.3.norm.weight              one name             the same                             PLAIN
...mlp.experts.gate_up_proj       one name             ...experts.0.w1.weight, ...          PretrainedFormat
...q_proj, k_proj, v_proj         several names        ...qkv_proj.weight
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from penstock.checkpoints.content import WEIGHTS, DtypeAndShape

DtypesAndShapes = Mapping[str, DtypeAndShape]
"""The dtypes and shapes of tensors by name."""


class ConversionUnit(TypedDict):
    """Tensors of a pipeline that become some tensors of one file together, such as Q, K and V that become one.

    One rank writes them. The fields are plain values, which ranks send each other.
    """

    names: list[str]
    """Names of the tensors in the pipeline."""
    file_types: DtypesAndShapes
    """The tensors in the file, by name there."""


class WeightFormat:
    """Names of files and tensors: the pipeline's own, and nothing but weights. Other formats override what differs."""

    @property
    def stem(self) -> str:
        """The text with which the names of the files begin, as in STEM.safetensors."""
        return WEIGHTS

    def units(self, tensors: DtypesAndShapes) -> list[ConversionUnit]:
        """Return how the tensors that a rank holds become tensors of files. Raises: CheckpointError."""
        return [
            ConversionUnit(names=[name], file_types={name: dtype_and_shape})
            for name, dtype_and_shape in tensors.items()
        ]

    def require_all(self, names: Collection[str]) -> None:
        """Refuse names, those of all ranks together, of which one is missing. Raises: CheckpointError."""

    def convert(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of one unit as they are in the file, by name there."""
        return tensors

    def write_further(self, folder: Path, file_types: DtypesAndShapes) -> None:
        """Make the folder and write files that belong beside the weights, such as a config, into it; or do nothing.

        Raises: OSError, NotSaved.
        """


PLAIN = WeightFormat()
