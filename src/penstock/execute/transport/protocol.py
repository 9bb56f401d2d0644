"""The protocol of a transport: messages between the ranks of a pipeline, and nothing else.

Messages travel on channels: one in-order channel per ordered pair of ranks and tag. Only shapes and types that both
ends agreed on before travel here; a transport does not describe what it carries. Ranks exchange texts beside
the data of a step (`control.collectives`) under a tag of their own, so that receives posted ahead never catch them.

After an error (`PeerLost`, `DeadlineExceeded`) only `abort`, `recover` and `close` have a defined outcome. A rank that
gets one calls `abort`, so that the ranks that wait for it fail too, then theirs, until no rank waits any more.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeGuard

from torch import Tensor

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.transport.rank_names import RankNames


class Tag(IntEnum):
    """The purpose of a message."""

    DATA = 0
    """A message of a step, between tensors on the pipeline's device."""
    CONTROL = 1
    """A message of the host, which is always in the memory of the CPU."""


class Ticket(NamedTuple):
    """One posted message; hand it to `wait` of the transport that gave it."""

    peer: int
    is_send: bool
    serial: int
    """Index of the message among all that this transport has posted."""
    is_over: bool = False
    """Whether the message had left when it was posted, so that nothing needs to be waited for."""


class WaitObserver(Protocol):
    """Wants to know for whom a rank waits; peers are told by their numbers."""

    @property
    def row(self) -> int:
        """Index of the rank's current instruction; -1 before the first one of a step."""

    def note_wait(self, peer: int, row: int | None = None) -> None:
        """A wait for this peer begins, for the instruction of this row; None: for the current one."""

    def note_run(self) -> None:
        """The wait is over; not called after a wait that failed."""

    def gave_up(self) -> int | None:
        """Return a peer that has given up the step at hand; None where none has, or none can be seen."""


class Messages(Protocol):
    """The messages of one rank; used from that rank's own thread only."""

    rank: int
    """Index in the pipeline group."""
    num_ranks: int

    def post_send(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        """Send a tensor without blocking; do not change it before its ticket has been waited for.

        The transport keeps the tensor alive until then. Raises: PeerLost.
        """

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        """Let the next message of the channel from `peer` fill this contiguous tensor, without blocking.

        The values are there once the ticket has been waited for. Raises: PeerLost.
        """

    def begin_group(self) -> None:
        """Begin a group: what is posted until `end_group` may be launched together, and must not be waited for before.

        A transport whose posts never hold each other up does nothing, and launches one after another.
        """
        ...

    def end_group(self) -> None:
        """Launch the messages of the group. Raises: PeerLost."""
        ...

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        """Block until the message has been sent or received; a second wait for the same ticket returns at once.

        `limit_s` takes the place of the deadline where less of it is left, as for the later messages of a collective.
        Raises: PeerLost, DeadlineExceeded (both with rank, peer and waited_s).
        """


class Transport(Messages, Protocol):
    """Carries the messages of one rank, and can give them up and start afresh."""

    deadline_s: float
    """Limit of every single wait and recovery, in seconds."""

    def waiting(self, limit_s: float) -> AbstractContextManager[None]:
        """Let every wait within last up to `limit_s` where that is longer than the deadline."""

    def watch(self, observer: WaitObserver) -> None:
        """Tell the observer of every wait from now on."""

    def abort(self) -> None:
        """Give up every message: pending and later waits of the ranks that wait for this one fail soon."""

    def recover(self) -> None:
        """Start afresh together with all ranks, all old messages forgotten; every rank of the group must call it.

        Raises: DeadlineExceeded if a rank does not come. It may be called again then.
        """

    def close(self) -> None:
        """Release everything; calling it twice does no harm."""


def wait_for_all(transport: Messages, tickets: Iterable[Ticket]) -> None:
    """Wait for some messages, one after another. Raises: PeerLost, DeadlineExceeded."""
    for ticket in tickets:
        transport.wait(ticket)


_MEMBERS = [name for kind in (Messages, Transport) for name in (*kind.__annotations__, *vars(kind)) if name[0] != "_"]


def missing_members(value: object) -> list[str]:
    """Return what a transport has and an object lacks."""
    return [name for name in _MEMBERS if not hasattr(value, name)]


def is_transport(value: object) -> TypeGuard[Transport]:
    """Whether an object has what a transport has, be it by `__getattr__`, which isinstance overlooks in Python 3.12."""
    return not missing_members(value)


def peer_lost(names: RankNames, rank: int, ticket: Ticket, waited_s: float, reason: str) -> PeerLost:
    """Say that the other end of a message is gone."""
    rank_name, peer, peer_number = names[rank], names[ticket.peer], names.numbers[ticket.peer]
    return PeerLost(
        f"{rank_name}: lost {peer} while it {_wait_of(names, ticket)}, after {waited_s:.2f} s: {reason}. "
        f"Look at the output of {peer} for the cause, then start all ranks again",
        rank=peer_number,
        peer=peer_number,
        waited_s=waited_s,
    )


def deadline_exceeded(
    names: RankNames, rank: int, ticket: Ticket, waited_s: float, deadline_s: float
) -> DeadlineExceeded:
    """Say that a message did not arrive or leave in time."""
    peer_number = names.numbers[ticket.peer]
    return DeadlineExceeded(
        f"{names[rank]}: {_wait_of(names, ticket)} for {waited_s:.2f} s, the deadline is {deadline_s:g} s. "
        f"Find out what {names[ticket.peer]} does, or allow more time if it is only slow",
        rank=peer_number,
        peer=peer_number,
        waited_s=waited_s,
    )


def missing_ranks(names: RankNames, rank: int, missing: list[int], waited_s: float) -> DeadlineExceeded:
    """Say which ranks did not come to a meeting of all ranks."""
    numbers = [names.numbers[index] for index in missing]
    first = numbers[0] if numbers else None
    return DeadlineExceeded(
        f"{names[rank]}: waited {waited_s:.2f} s for all ranks to connect, but ranks {numbers} did not come. "
        "See whether they still run and come to the same call, as every rank must; if not, start all ranks again",
        rank=first,
        peer=first,
        waited_s=waited_s,
    )


def _wait_of(names: RankNames, ticket: Ticket) -> str:
    if ticket.is_send:
        return f"waited to send message {ticket.serial} to {names[ticket.peer]}"
    return f"waited to receive message {ticket.serial} from {names[ticket.peer]}"
