"""Brings the clocks of ranks on different hosts to one scale, by pings before and after a recorded step.

    rank 0   t0 ───────┐              ┌──► t3      the other clock is ahead by ((t1 - t0) + (t2 - t3)) / 2,
    rank r             └──► t1 ... t2 ┘            give or take half the time on the way, (t3 - t0) - (t2 - t1)

That is NTP's rule (RFC 5905, section 8), and as there the ping that was on its way for the shortest time counts. Clocks
also drift apart, so the offset is taken twice and interpolated for the time between. Ranks of one host read one clock.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.execute.control.collectives import Control
from penstock.execute.control.hosts import host_of_clock
from penstock.execute.transport.protocol import Transport

NUM_PINGS = 16


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a rank; ranks whose `host` is equal read the same one."""

    read: Callable[[], float] = time.monotonic
    """Seconds."""
    host: str = field(default_factory=host_of_clock)


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a clock was ahead of rank 0's at one moment."""

    at_s: float
    """The moment, on the clock itself."""
    ahead_s: float
    uncertainty_s: float
    """The true offset lies within this many seconds."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How all ranks' clocks go against rank 0's; one entry per rank, at two moments around what was measured."""

    first: tuple[Offset, ...]
    last: tuple[Offset, ...]

    def to_common(self, rank: int, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return times of a rank's clock on rank 0's."""
        first, last = self.first[rank], self.last[rank]
        length_s = last.at_s - first.at_s
        drift = (last.ahead_s - first.ahead_s) / length_s if length_s > 0 else 0.0
        return times_s - (first.ahead_s + drift * (times_s - first.at_s))

    @property
    def uncertainty_s(self) -> float:
        """The most by which times of two ranks may still be off against each other; 0 on one host."""
        pairs = set(zip(self.first, self.last, strict=True))  # ranks of one host have equal ones, and count once
        return sum(sorted(max(first.uncertainty_s, last.uncertainty_s) for first, last in pairs)[-2:])


@dataclass(slots=True, eq=False)
class ClockComparison:
    """Compares the clocks of all ranks, which make it, and call `begin` and `end`, together, no message under way."""

    transport: Transport
    device: torch.device
    clock: Clock
    hosts: Sequence[str]
    """Name of each rank's host; ranks with equal names share a clock."""
    _first: Sequence[Offset] = ()

    def begin(self) -> None:
        """Compare once; a collective, after which all ranks go on at nearly the same time."""
        self._first = self._compare()
        if len(set(self.hosts)) > 1:
            # Rank 0 pings one host after the other: let none run ahead.
            Control(self.transport).all_gather_object(None)

    def end(self) -> Alignment:
        """Compare the clocks again, and return rank 0's offsets on all ranks; a collective."""
        offset_rows = [list(map(astuple, offsets)) for offsets in (self._first, self._compare())]
        rows_of_rank_0 = Control(self.transport).all_gather_object(offset_rows)[0]  # only rank 0 has any
        assert isinstance(rows_of_rank_0, list)
        hosts = list(dict.fromkeys(self.hosts))
        places = [hosts.index(host) for host in self.hosts]
        return Alignment(*(tuple(Offset(*rows[place]) for place in places) for rows in rows_of_rank_0))

    def _compare(self) -> list[Offset]:
        """Return the offset of every host, by pings to its first rank, on rank 0; an empty list on other ranks."""
        transport, hosts = self.transport, self.hosts
        pinged_ranks = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
        if transport.rank in pinged_ranks:
            read = self.clock.read
            question = torch.zeros(1, dtype=torch.float64, device=self.device)
            reply(
                transport,
                0,
                question,
                # These are the moments at which the question came and is answered.
                lambda: torch.tensor([read(), read()], dtype=torch.float64).to(self.device),
                NUM_PINGS,
            )
        if transport.rank != 0:
            return []
        offsets = [Offset(self.clock.read(), 0.0, 0.0)]
        for rank in pinged_ranks:
            pings = [self._ping(rank) for _ in range(NUM_PINGS)]
            # The fastest ping is the one that waited least in queues, in either direction.
            offsets.append(min(pings, key=lambda offset: offset.uncertainty_s))
        return offsets

    def _ping(self, rank: int) -> Offset:
        question, answer = (torch.zeros(size, dtype=torch.float64, device=self.device) for size in (1, 2))
        sent_s, received_s = ask(self.transport, rank, question, answer, self.clock.read)
        received_there_s, sent_there_s = answer.tolist()
        on_the_way_s = (received_s - sent_s) - (sent_there_s - received_there_s)
        ahead_s = ((received_there_s - sent_s) + (sent_there_s - received_s)) / 2
        return Offset(received_there_s, ahead_s, max(on_the_way_s, 0.0) / 2)


def ask(
    transport: Transport, peer: int, question: torch.Tensor, answer: torch.Tensor, read: Callable[[], float]
) -> tuple[float, float]:
    """Send a question to a peer that calls `reply`; return when it left, and when `answer` had been filled."""
    transport.begin_group()  # alone, the receive would hold the question up
    receipt = transport.post_receive(peer, answer)
    sent_s = read()
    sending = transport.post_send(peer, question)
    transport.end_group()
    transport.wait(receipt)
    answer.tolist()  # on a GPU the wait only orders the stream
    received_s = read()
    transport.wait(sending)
    return sent_s, received_s


def reply(
    transport: Transport, peer: int, question: torch.Tensor, make_answer: Callable[[], torch.Tensor], num_trips: int
) -> None:
    """Answer so many questions of a peer; `question` receives them, one after another."""
    for _ in range(num_trips):
        transport.wait(transport.post_receive(peer, question))
        question[-1].item()  # on a GPU the wait only orders the stream
        transport.wait(transport.post_send(peer, make_answer()))
