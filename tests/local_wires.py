"""Wires between ranks that are threads, on which messages move in a drawn order, or late.

    ordered(order_seed)    a message moves only when every rank waits, has closed its transport or recovers; then the
                           next channel is drawn. As each rank does the same between two waits, the order depends on
                           the seed alone, and not on the system's scheduling of threads
    slow(delay_s)          a message of data moves so many seconds after it was sent, to play a slow wire

Each keeps the order of every channel. What they return connects as `LocalTransport.create` does.
"""

import time
from functools import partial
from random import Random

from penstock.errors import PipelineError
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.local import Wires
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.rank_names import RankNames
from penstock.running_time import LONGEST_PART_S, wait_in_parts

MAX_WAIT_S = LONGEST_PART_S
"""Messages of a drawn order move on after so long although a rank neither waits nor ends: it may be gone.

A rank that a busy machine lets wait for its turn must not count as gone, or the seed alone would not decide the order.
"""


class OrderedWires(Wires):
    """Messages move in an order drawn from a seed."""

    def __init__(self, names, order_seed):
        super().__init__(names)
        self.order_seed = order_seed
        self._random = Random(order_seed)
        self._waiting = {}
        """By rank, what it waits for."""

    def deliver(self, channel):
        """Nothing moves before all ranks wait."""

    def wait(self, rank, channel, message, limit_s):
        self._waiting[rank] = message
        try:
            while len({*self._waiting, *self.closed, *self.recovering}) == self.num_ranks and self._move_one():
                pass
            if message.is_done or wait_in_parts(self.changed.wait, min(limit_s, MAX_WAIT_S)):
                return
            self._move_one()  # nothing has changed for a while: a rank that is gone must not hold up the others
        finally:
            self._waiting.pop(rank, None)

    def _move_one(self):
        """Move the first message of a channel that is drawn; tell whether there was one."""
        ready = [key for key in sorted(self.channels) if self.channels[key].is_ready]
        if not ready:
            return False
        self.channels[self._random.choice(ready)].move()
        self._waiting = {rank: message for rank, message in self._waiting.items() if not message.is_done}
        self.changed.notify_all()
        return True

    def trouble(self, peer, channel):
        """What a rank posted before it closed may still be to come."""
        is_to_come = self.aborted_by is None and channel.is_ready
        return "" if is_to_come else super().trouble(peer, channel)


class OrderedTransport(LocalTransport):
    """Its errors name the seed."""

    def wait(self, ticket, limit_s=None):
        try:
            super().wait(ticket, limit_s)
        except PipelineError as error:
            error.add_note(f"messages moved in the order of order_seed={self._wires.order_seed}")
            raise


class SlowWires(Wires):
    """`delay_s(source, destination, num_bytes=...)` gives the seconds of a message of data."""

    def __init__(self, names, delay_s):
        super().__init__(names)
        self.delay_s = delay_s
        self._ready_s = {}
        """By message that was sent, `time.monotonic()` before which it does not move."""

    def deliver(self, channel):
        for sent in channel.sends:
            if sent not in self._ready_s:
                ends = channel.source, channel.destination
                delay_s = self.delay_s(*ends, num_bytes=sent.tensor.nbytes) if channel.tag is Tag.DATA else 0.0
                self._ready_s[sent] = time.monotonic() + delay_s
        while channel.is_ready and self._ready_s[channel.sends[0]] <= time.monotonic():
            del self._ready_s[channel.sends[0]]
            channel.move()
        self.changed.notify_all()  # a rank that waits for a slow message must learn when it comes

    def wait(self, rank, channel, message, limit_s):
        if channel.is_ready:
            limit_s = min(limit_s, self._ready_s[channel.sends[0]] - time.monotonic())
        wait_in_parts(self.changed.wait, min(max(limit_s, 0.0), LONGEST_PART_S))
        if channel.is_ready and self._ready_s[channel.sends[0]] <= time.monotonic():
            self.deliver(channel)


def ordered(order_seed):
    """Connect ranks by wires whose order of messages is drawn; None stands for those that keep no order back."""
    if order_seed is None:
        return LocalTransport.create
    return partial(_connect, OrderedTransport, lambda names: OrderedWires(names, order_seed))


def slow(delay_s):
    """Connect ranks by slow wires."""
    return partial(_connect, LocalTransport, lambda names: SlowWires(names, delay_s))


def _connect(kind, make_wires, num_ranks, deadline_s=60.0, *, names=None):
    wires = make_wires(names or RankNames.plain(num_ranks))
    return [kind(wires, rank, deadline_s) for rank in range(num_ranks)]
