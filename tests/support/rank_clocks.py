"""Clocks of ranks that are threads, on which time passes only as a test says: seconds are exact on a busy machine.

The clock of a rank goes on where the rank sleeps, and where it waits for a message, to the arrival of that message:

    rank 0   sleeps 3 s | sends, at 3           each message carries the time of its arrival, as in L. Lamport's
    rank 1   waits ............... | 3.5        "Time, clocks, and the ordering of events" (1978)
                                                (the channel takes 0.5 s)

What ranks compute takes no time. Passed off as the module `time`, it also gives the seconds of what sleeps.
"""

import threading
from collections import defaultdict
from functools import partial
from random import Random

from penstock.execute.transport import LocalTransport
from penstock.execute.transport.local import Wires
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.rank_names import RankNames


class RankClocks(threading.local):
    """The clock of the calling thread, from 0 on; a sleep takes up to `noise` of its seconds longer."""

    def __init__(self, noise=0.0):
        self._now_s, self._noise, self._chance = 0.0, noise, Random(0)

    def monotonic(self):
        return self._now_s

    perf_counter = monotonic

    def sleep(self, duration_s):
        self._now_s += duration_s * self._chance.uniform(1.0, 1.0 + self._noise)

    def advance_to(self, moment_s):
        self._now_s = max(self._now_s, moment_s)


def _no_delay(source, destination, num_bytes):
    return 0.0


class ClockedTransport(LocalTransport):
    """A rank whose waits for messages set its clock."""

    def __init__(self, wires, rank, deadline_s, clocks, arrivals_s, delay_s):
        super().__init__(wires, rank, deadline_s)
        self._clocks, self._arrivals_s, self._delay_s = clocks, arrivals_s, delay_s
        self._num_receives = defaultdict(int)
        self._messages = {}
        """By serial of a receive, the channel of its message and its number there."""

    def post_send(self, peer, tensor, tag=Tag.DATA):
        ends = self.rank, peer
        delay_s = self._delay_s(*ends, num_bytes=tensor.nbytes) if tag is Tag.DATA else 0.0
        arrivals_s = self._arrivals_s[*ends, tag]
        arrivals_s.append(max([self._clocks.monotonic() + delay_s, *arrivals_s[-1:]]))
        return super().post_send(peer, tensor, tag)

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        ticket, channel = super().post_receive(peer, tensor, tag), (peer, self.rank, tag)
        self._messages[ticket.serial] = channel, self._num_receives[channel]
        self._num_receives[channel] += 1
        return ticket

    def wait(self, ticket, limit_s=None):
        super().wait(ticket, limit_s)
        if ticket.serial in self._messages:
            channel, number = self._messages.pop(ticket.serial)
            self._clocks.advance_to(self._arrivals_s[channel][number])


def clocked(clocks, delay_s=_no_delay):
    """Connect as `LocalTransport.create` does; messages of data take `delay_s(source, destination, num_bytes=...)`."""
    return partial(_connect, clocks, delay_s)


def _connect(clocks, delay_s, num_ranks, deadline_s=60.0, *, names=None):
    wires, arrivals_s = Wires(names or RankNames.plain(num_ranks)), defaultdict(list)
    return [ClockedTransport(wires, rank, deadline_s, clocks, arrivals_s, delay_s) for rank in range(num_ranks)]
