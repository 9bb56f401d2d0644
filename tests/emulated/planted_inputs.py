"""Planted faults in the copies of batches that are in the host's memory.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

from dataclasses import replace

import torch

from tests.emulated.checker import FREED, PINNED, REUSED, UNORDERED
from tests.emulated.planting import HOST_WAITS, does_nothing, table

FAULTS, plant = table()
MODULE = "penstock.execute.batch.host_to_device:"
COPIES = f"{MODULE}HostToDevice."
SCENARIO = "batches_of_the_host"
COPY, HOST = "copy to the device", "the host"


# ---- what waits for a copy


@plant("nobody waits for the copies of inputs", SCENARIO, f"{COPIES}arrive", UNORDERED, COPY, "addmm")
def _(original):
    return lambda copies, index: copies._under_way.pop(index, None)


@plant("a stream that computes nothing waits for inputs", SCENARIO, f"{COPIES}_current", UNORDERED, COPY, "addmm")
def _(original):
    return lambda copies: torch.Stream("emu")


@plant("the marker of copies is never recorded", SCENARIO, f"{MODULE}_UnderWay", UNORDERED, COPY, "addmm")
def _(original):
    return lambda targets, has_ended, own: original(targets, torch.Event("emu"), own)


@plant("the marker of copies is recorded before them", SCENARIO, f"{COPIES}_copied", UNORDERED, COPY, "addmm")
def _(original):
    def copied(copies, index, sources):
        marker = torch.Event("emu")
        marker.record(copies._stream)
        targets = original(copies, index, sources)
        copies._under_way[index] = replace(copies._under_way[index], has_ended=marker)
        return targets

    return copied


# ---- the memory on the device


@plant("copies do not wait until their memory is free", SCENARIO, f"{COPIES}_reserve", REUSED, "addmm", COPY)
def _(original):
    return lambda copies, like: replace(original(copies, like), is_free=torch.Event("emu"))


@plant("record_stream is missing for inputs", SCENARIO, f"{COPIES}_reserve", FREED, "addmm", "free")
def _(original):
    def reserve(copies, like):
        with copies._stream:
            return original(copies, like)

    return reserve


@plant("a failed step drops the memory of copies on their way", "failing_copies", f"{COPIES}end", REUSED, COPY, "zero_")
def _(original):
    def end(copies, *, has_failed):
        copies._under_way.clear()
        original(copies, has_failed=has_failed)

    return end


# ---- the memory on the host


@plant("a batch is copied from memory that is not pinned", SCENARIO, f"{MODULE}pinned_copy", HOST_WAITS, COPY)
def _(original):
    return lambda tensor: tensor.clone()


@plant("pinned memory gets the next inputs too early", SCENARIO, f"{MODULE}pinned_copy", PINNED, COPY, HOST)
def _(original):
    buffers = {}

    def pinned_copy(tensor):
        buffer = buffers.setdefault(tensor.shape, original(tensor))
        return buffer.copy_(tensor)

    return pinned_copy


@plant(
    "a step ends before the copies from the caller's pinned batch",
    SCENARIO,
    f"{MODULE}await_device",
    PINNED,
    COPY,
    HOST,
)
def _(original):
    return does_nothing(original)


@plant("a step waits for its first copy only", SCENARIO, f"{COPIES}_queue_copies", PINNED, COPY, HOST)
def _(original):
    def queue_copies(copies, sources, reserved, has_ended):
        first = copies._last_caller_copy
        original(copies, sources, reserved, has_ended)
        copies._last_caller_copy = first or copies._last_caller_copy

    return queue_copies


@plant(
    "inputs are copied from the pinned tensors that a stream fills again",
    "refilled_buffers",
    "penstock.execute.batch.admission:pinned_or_copied",
    PINNED,
    COPY,
    HOST,
)
def _(original):
    return lambda leaf: leaf
