"""How a part calls the forward of the whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.trees import tensors_in


class BatchRun(Protocol):
    """A run of the forward, which knows the leaves that the first stage alone is given."""

    def batch_leaf(self, name: str, tensor: Tensor) -> Tensor:
        """Return an argument of the batch; elsewhere than on the first stage, `tensor` has its shape alone."""


@dataclass(frozen=True, slots=True)
class PartCall:
    """The arguments with which a part calls the forward of the whole model."""

    inputs: tuple[Any, ...]
    """The positional arguments of the part."""
    keywords: Mapping[str, Any]
    """The keywords of the batch."""
    is_first: bool
    is_training: bool = False
    run: BatchRun | None = None
    """The run that is under way."""

    def batch_leaf(self, name: str, tensor: Tensor) -> Tensor:
        """Return an argument of the batch that the first stage alone is given; elsewhere `tensor` has its shape."""
        return tensor if self.run is None else self.run.batch_leaf(name, tensor)

    def device(self, part_modules: Mapping[str, nn.Module]) -> torch.device:
        """Return the device of the part's modules, else that of its inputs."""
        modules = part_modules.values()
        part_tensors = (tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
        tensors = chain(part_tensors, tensors_in((self.inputs, dict(self.keywords))))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


class Entry(Protocol):
    """How the forward of the whole model is called, on any stage."""

    batch_signature: BatchSignature
    """The arguments of the forward that a batch may have."""

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        """Call the forward for a part; return the model's output."""
        ...
