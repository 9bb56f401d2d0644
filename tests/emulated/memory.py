"""The device's memory: pools by device, stream and size, as torch's caching allocator has them.

A block goes back to its pool when its tensor dies, before the stream has come there; that is right, because the stream
that allocated it will also use it next. `record_stream` holds a block back until the named streams have passed, and
orders nothing else. Memory is poisoned when it gets its next tensor, in the order of its stream, so that whoever reads
it late reads NaN.
"""

import ctypes
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.emulated.checker import Place
from tests.emulated.queues import Item
from tests.emulated.stacks import capture

ROUNDED_TO_BYTES = 512
"""Sizes are rounded up to a multiple of it, as on a GPU."""
POISON = 0xFF
"""NaN in every float type, -1 in every integer type."""


@dataclass(eq=False)
class Block:
    """One allocation, whole; it is never split."""

    memory: torch.Tensor
    size: int
    """Rounded up."""
    queue: object
    place: Place
    recorded: set = field(default_factory=set)
    """The queues of `record_stream`."""
    marks: list = field(default_factory=list)
    """What must be passed before it goes back to its pool."""
    requested: int = 0
    """What its tensor needs of it."""


@dataclass
class Statistics:
    """Bytes of one device."""

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0

    def add(self, allocated, reserved):
        self.allocated += allocated
        self.reserved += reserved
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)


class Memory:
    """The blocks of all devices."""

    def __init__(self, queues, checker):
        self._queues, self._checker = queues, checker
        self.live, self._pools, self._held_back, self._statistics = {}, {}, [], {}
        self._survivors = {}

    def reset(self, checker):
        """Forget all blocks; tensors that survive keep their bytes, and nothing is checked when they die."""
        self._checker = checker
        self._survivors.update(self.live)
        self.live, self._pools, self._held_back, self._statistics = {}, {}, [], {}

    def statistics_of(self, device):
        return self._statistics.setdefault(device, Statistics())

    def allocate(self, size, queue, host):
        self._checker.note_allocation(queue, host.clock)
        requested, size = size, -(-size // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES
        self._collect()
        pool = self._pools.get((queue, size))
        statistics = self.statistics_of(queue.device)
        if pool:
            block = pool.pop()
            self._queues.put(queue, Item("poison of freed memory", partial(_poison, block)))
        else:
            memory = torch.empty(size, dtype=torch.uint8)
            block = Block(memory, size, queue, Place(f"{size} B of emu:{queue.device}"))
            _poison(block)
            statistics.add(0, size)
        statistics.add(size, 0)
        block.requested = requested
        block.place.tenant += 1
        block.place.is_free = False
        address = block.memory.data_ptr()
        self.live[address] = block
        return address

    def free(self, address, host):
        block = self.live.pop(address, None)
        if block is None:
            self._survivors.pop(address, None)
            return
        self._checker.note_free(block.place, block.queue, block.recorded, capture())
        self.statistics_of(block.queue.device).add(-block.size, 0)
        block.place.is_free = True
        if block.recorded:
            block.marks = [self._queues.mark(queue, "end of use (record_stream)") for queue in block.recorded]
            self._held_back.append(block)
        else:
            self._return(block)

    def record_stream(self, address, queue):
        block = self.live.get(address)
        if block is not None and queue is not block.queue:
            block.recorded.add(queue)

    def empty_cache(self):
        for (queue, size), pool in self._pools.items():
            self.statistics_of(queue.device).add(0, -size * len(pool))
            pool.clear()

    def reset_peak(self, device):
        statistics = self.statistics_of(device)
        statistics.allocated_peak, statistics.reserved_peak = statistics.allocated, statistics.reserved

    def _collect(self):
        """Give back what `record_stream` held, where the streams have passed. It does not make them go on."""
        passed = [block for block in self._held_back if all(mark.is_done for mark in block.marks)]
        for block in passed:
            self._held_back.remove(block)
            # The allocator has seen the marks, so those accesses are over for whoever gets the block next.
            block.place.accesses = [a for a in block.place.accesses if a.queue not in block.recorded]
            block.recorded, block.marks = set(), []
            self._return(block)

    def _return(self, block):
        self._pools.setdefault((block.queue, block.size), []).append(block)


def _poison(block):
    ctypes.memset(block.memory.data_ptr(), POISON, block.size)
