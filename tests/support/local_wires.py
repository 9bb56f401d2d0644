"""Wires between ranks that are threads, on which messages move in a drawn order.

A message moves only when every rank waits, has closed its transport or recovers; then the next channel is drawn. As
each rank does the same between two waits, the order depends on the seed alone, and not on the system's scheduling of
threads. Every channel keeps its order.
"""

from functools import partial
from random import Random

from penstock.errors import PipelineError
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.local import Wires
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


def ordered(order_seed):
    """Connect as `LocalTransport.create` does, by wires with a drawn order; None stands for wires without one."""
    return LocalTransport.create if order_seed is None else partial(_connect, order_seed)


def _connect(order_seed, num_ranks, deadline_s=60.0, *, names=None):
    wires = OrderedWires(names or RankNames.plain(num_ranks), order_seed)
    return [OrderedTransport(wires, rank, deadline_s) for rank in range(num_ranks)]
