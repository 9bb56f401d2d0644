"""A device that has failed: nothing on it is freed any more.

When a tensor is freed that several streams have used, such as a message, torch's allocator asks the device about them.
One that has failed answers with an error, which ends the process before it has said what is wrong.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.execute.accelerator import has_events, is_queued


def has_failed(device: torch.device) -> bool:
    """Whether a device runs nothing any more: an assertion in a kernel has failed, say."""
    return is_queued(device) and not has_events(device)


@contextmanager
def keeping_what_is_lost(device: torch.device) -> Iterator[None]:
    """Where a device fails within, keep all tensors on it until the process ends, and after."""
    try:
        yield
    except BaseException:
        if has_failed(device):
            tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
            kept = [each for each in tensors if each.device.type == device.type]
            # No name holds it: Python frees what names hold before the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        raise
