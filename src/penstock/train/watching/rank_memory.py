"""How much memory a rank has taken at most."""

import resource
import sys

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes; getrusage counts in these."""


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes so far: of tensors on a GPU, else those that the process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
