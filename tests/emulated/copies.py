"""Copies between devices and host, and single values that the host reads.

The host waits for every copy that is not both non-blocking and on pinned memory.
"""

from functools import partial

from tests.emulated.kernels import is_of_device
from tests.emulated.runtime import RUNTIME

TO_DEVICE, TO_HOST, BETWEEN = "copy to the device", "copy to the host", "copy"


def copy_from(source, target, non_blocking=False):
    if is_of_device(source) and is_of_device(target):
        _copy_between(source, target)
    elif is_of_device(target):
        _copy_to_device(source, target, non_blocking)
    else:
        _copy_to_host(source, target, non_blocking)
    return target


def copy_from_and_resize(source, target):
    return copy_from(source, target.resize_(source.shape))


def read_value(tensor):
    queue, value = RUNTIME.current_queue(tensor.device.index), RUNTIME.extension.as_cpu(tensor)
    found = []
    RUNTIME.launch(queue, "item", lambda: found.append(value.item()), [tensor])
    RUNTIME.wait_here(queue, "item")
    return found[0]


def _copy_between(source, target):
    queue, other = (RUNTIME.current_queue(tensor.device.index) for tensor in (source, target))
    copy = partial(RUNTIME.extension.as_cpu(target).copy_, RUNTIME.extension.as_cpu(source))
    if queue is other:
        RUNTIME.launch(queue, BETWEEN, copy, [source], [target])
        return
    # As on GPUs: the source's stream copies, and the current streams of both devices wait for each other.
    queues = RUNTIME.queues
    queues.wait_for(queue, queues.mark(other, "begin of a copy"))
    RUNTIME.launch(queue, BETWEEN, copy, [source], [target])
    queues.wait_for(other, queues.mark(queue, "end of a copy"))


def _copy_to_device(source, target, non_blocking):
    queue, bytes_of_device = RUNTIME.current_queue(target.device.index), RUNTIME.extension.as_cpu(target)
    if non_blocking and source.is_pinned():
        RUNTIME.launch(queue, TO_DEVICE, partial(bytes_of_device.copy_, source), [], [target], pinned=source)
        return
    RUNTIME.launch(queue, TO_DEVICE, partial(bytes_of_device.copy_, source.detach().clone()), [], [target])
    RUNTIME.wait_here(queue, TO_DEVICE)


def _copy_to_host(source, target, non_blocking):
    queue, bytes_of_device = RUNTIME.current_queue(source.device.index), RUNTIME.extension.as_cpu(source)
    target = target.detach()
    if non_blocking and target.is_pinned():
        RUNTIME.launch(queue, TO_HOST, partial(target.copy_, bytes_of_device), [source], pinned=target)
        return
    RUNTIME.launch(queue, TO_HOST, partial(target.copy_, bytes_of_device), [source])
    RUNTIME.wait_here(queue, TO_HOST)


def register(library):
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_copy_from_and_resize", copy_from_and_resize, "PrivateUse1")
    library.impl("_local_scalar_dense", read_value, "PrivateUse1")
