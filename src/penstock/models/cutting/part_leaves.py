"""`PartLeaves`: the leaves that a part has got of earlier parts, and those that it hands on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.trees import tensors_in


class PartLeaves:
    """Leaves by label, in one run of a part."""

    def __init__(self, arrived: Mapping[str, Tensor], wanted: tuple[str, ...], changed: frozenset[str]) -> None:
        """`wanted` are the labels of what goes on to the next part, `changed` those that the forward changes in place.

        A forward that changes a leaf in place changes a copy of it, in each part.
        """
        self._changed = changed
        self._wanted = wanted
        self.arrived = {label: _as_computed(self._own(label, leaf)) for label, leaf in arrived.items()}
        self._outgoing = {label: leaf for label, leaf in arrived.items() if label in wanted}

    def keep(self, label: str, leaf: Tensor) -> None:
        """Keep a leaf that the part has made or holds, if it goes on."""
        if label in self._wanted:
            self._outgoing[label] = self._own(label, leaf)

    def keep_output(self, label: str, output: Any) -> None:
        """Keep the leaves of what the call `label` of a submodule has returned."""
        for index, tensor in enumerate(tensors_in(output)):
            self.keep(f"{label}.{index}", tensor)

    def keep_held(self, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Keep the parameters and buffers of a part, and of its submodules, by name."""
        for name, tensor in tensors.items():
            # A buffer may get another value while its earlier one is on its way.
            self.keep(name, tensor if isinstance(tensor, nn.Parameter) else tensor.clone())
        for label in self._wanted:
            holder = next((name for name in modules if label.startswith(f"{name}.")), None)
            if holder is not None and "#" not in label:
                path, _, attribute = label.removeprefix(f"{holder}.").rpartition(".")
                self.keep(label, getattr(modules[holder].get_submodule(path), attribute))

    def outgoing(self) -> dict[str, Tensor]:
        """Return the leaves that go on to the next part. Raises: PenstockError, if one was not made."""
        missing_labels = [label for label in self._wanted if label not in self._outgoing]
        if missing_labels:
            raise PenstockError(
                f"the forward has not made {missing_labels[0]!r}, which a later layer needs, as a run without values "
                "did; all that it decides by must follow from the batch"
            )
        return {label: self._outgoing[label] for label in self._wanted}

    def _own(self, label: str, leaf: Tensor) -> Tensor:
        return leaf.clone() if label in self._changed else leaf


def _as_computed(tensor: Tensor) -> Tensor:
    """Return a tensor that has a `grad_fn`, as in one process: what came from another stage begins a graph."""
    begins_graph = tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    return tensor.view_as(tensor) if begins_graph and torch.is_grad_enabled() else tensor
