"""What torch does not document: how often a tensor was changed in place."""

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version
