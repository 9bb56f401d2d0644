"""What a rank holds of tensors that are spread over ranks.

Asked of their methods: to import torch.distributed.tensor takes half a second, which a model without them need not pay.
"""

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`."""
    return type(tensor) is not Tensor and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, once it has arrived; any other tensor as it is."""
    if type(tensor) is Tensor:  # every message asks, and to look for an attribute in vain takes its time
        return tensor
    if is_dtensor(tensor):
        tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    wait = getattr(tensor, "wait", None)  # of what a collective is still filling
    part: Tensor = tensor if wait is None else wait()
    return part
