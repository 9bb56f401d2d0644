"""A device that has failed: nothing on it is freed any more.

When a tensor is freed that several streams have used, such as a message, torch's allocator asks the device about them.
One that has failed answers with an error, which ends the process before it has said what is wrong.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, compress, repeat
from operator import call
from typing import TypeVar

import torch
from torch import Tensor

from penstock.execute.accelerator import has_events, is_queued
from penstock.garbage import garbage_left

Instance = TypeVar("Instance")


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
            lost_tensors = [tensor for tensor in living_instances(Tensor) if tensor.device.type == device.type]
            # No name holds the list: Python frees what names hold before the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lost_tensors))
        raise


def living_instances(kind: type[Instance]) -> list[Instance]:
    """Return all objects of a class, or of one below it, that the garbage collector knows; other threads may run.

    `gc.get_objects()` returns a list of all objects. While it lives, a tuple that another thread is filling has two
    owners, and CPython refuses to fill such a tuple: that thread gets a SystemError. Threads take turns between lines
    of bytecode only, so one instruction makes the list, reads it and frees it, by iterators that are written in C. The
    collector is off meanwhile, for it may run what a class does when its objects die.
    """
    with garbage_left():
        return [*_iterate_instances(kind)]


def _iterate_instances(kind: type[Instance]) -> Iterator[Instance]:
    """Ask for all objects when the first one is read. By `type`: a proxy answers `isinstance` by code of its own."""
    objects_twice = chain.from_iterable(map(repeat, map(call, [gc.get_objects]), [2]))  # one list, to be read two times
    are_instances = map(map, [issubclass], map(map, [type], objects_twice), [repeat(kind)])
    return chain.from_iterable(map(compress, objects_twice, are_instances))
