"""How much memory a rank has taken at most."""

import resource
import sys

import torch

from penstock.execute.accelerator import allocator_bytes

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes; getrusage counts in these."""


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes so far: of tensors on an accelerator, else those that the process had in memory."""
    most = allocator_bytes(device, peak=True)
    if most is not None:
        return most.allocated
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
