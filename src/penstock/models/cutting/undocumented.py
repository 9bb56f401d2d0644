"""Uses of torch that it does not document: counts of changes in place, results of torch.compile, unsaved buffers."""

from torch import Tensor, nn


def version_of(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has returned this module, whose forward is the compiler's."""
    return hasattr(module, "dynamo_ctx")


def is_saved(module: nn.Module, name: str) -> bool:
    """Whether a buffer that a module holds itself is a part of its state."""
    return name not in module._non_persistent_buffers_set
