"""`LabelTable`: which tensors are computed from which leaves."""

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from penstock.models.cutting.trees import tensors_in
from penstock.models.cutting.undocumented import storage_key, storage_of, version_of

NO_LABELS: frozenset[str] = frozenset()
UNKNOWN = "a parameter of a submodule"
"""The label of values on the meta device that no submodule returned, such as those of `block.parameters()`."""


class LabelTable:
    """The labels of tensors, by the memory in which these lie, so that views and changes in place are followed."""

    def __init__(self) -> None:
        super().__init__()
        self._labels_by_storage: dict[int, tuple[UntypedStorage, frozenset[str]]] = {}
        self._leaf_by_id: dict[int, tuple[Tensor, int, str]] = {}
        self.changed_labels: set[str] = set()
        """The labels of leaves that the forward changes in place."""
        self.typed_labels: set[str] = set()
        """The labels of leaves whose types the forward asks for, or takes for a constant."""

    def add_leaf(self, tensor: Tensor, label: str) -> None:
        """Label a tensor as a leaf."""
        self.set_labels(tensor, frozenset([label]))
        self._leaf_by_id[id(tensor)] = tensor, version_of(tensor), label

    def leaf_label(self, tensor: Tensor) -> str | None:
        """Return the label of a tensor that is a leaf as it was made; None for any other."""
        leaf, version, label = self._leaf_by_id.get(id(tensor), (None, 0, ""))
        return label if leaf is tensor and version_of(tensor) == version else None

    def labels_of(self, value: Any) -> frozenset[str]:
        """Return the labels of the leaves from which the tensors of a tree are computed."""
        labels = [found for tensor in tensors_in(value) if (found := self._labels_of(tensor))]
        return NO_LABELS.union(*labels) if labels else NO_LABELS

    def note_change(self, tensor: Tensor, labels: frozenset[str]) -> None:
        """Note a change in place by an operator on a copy of the tensor, or on itself."""
        self.changed_labels |= {label for label in self._labels_of(tensor) if label != UNKNOWN}
        self.add_labels(tensor, labels)
        if not tensor.is_meta and not tensor.is_inference():
            with torch.no_grad():
                tensor.copy_(tensor.clone())  # counted as a change, so that a constant that is changed is found

    def _labels_of(self, tensor: Tensor) -> frozenset[str]:
        storage = storage_of(tensor)
        if storage is not None and (found := self._labels_by_storage.get(storage_key(storage))) is not None:
            return found[1]
        return frozenset([UNKNOWN]) if tensor.is_meta else NO_LABELS

    def add_labels(self, tensor: Tensor, labels: frozenset[str]) -> None:
        """Label a tensor, and all that shares its memory, with further leaves."""
        storage = storage_of(tensor)
        if storage is not None:
            _, earlier_labels = self._labels_by_storage.get(storage_key(storage), (storage, NO_LABELS))
            self._labels_by_storage[storage_key(storage)] = storage, labels | earlier_labels

    def set_labels(self, tensor: Tensor, labels: frozenset[str]) -> None:
        """Label a tensor, and all that shares its memory, with these leaves alone."""
        storage = storage_of(tensor)
        if storage is not None:  # kept, so that no other tensor gets this memory
            self._labels_by_storage[storage_key(storage)] = storage, labels
