"""The named models of how messages travel between ranks: what a lowering keeps to and a proof assumes.

In every model a computation waits for the messages that it consumes, and a tied reduction and an optimizer step wait
for all their ranks. A channel is the in-order queue of messages from one rank to one other.
"""

import re
from dataclasses import dataclass

from penstock.errors import ConfigError, described, nearest, shortened

ALL = "all"
"""Stands for every model."""
_BUFFERED = re.compile(r"buffered\b(.*)", re.DOTALL)
_CAPACITY = re.compile(r"\(([1-9][0-9]{0,8})\)")


@dataclass(frozen=True, slots=True)
class TransportModel:
    """One model; its name is what `check`, `lower` and the command line take."""

    name: str
    meaning: str
    backend: str
    """Which backend obeys it."""
    capacity: int | None = None
    """How many messages of a channel may be sent ahead of their receives; None where sends never block."""

    def __str__(self) -> str:
        return self.name


POSTED = TransportModel(
    "posted",
    "Posting a send or a receive never blocks; the n-th send of a channel goes to its n-th receive.",
    "gloo and NCCL as Penstock uses them (LocalTransport, TorchTransport)",
)
RENDEZVOUS = TransportModel(
    "rendezvous",
    "A send blocks until its receive is posted.",
    "MPI's MPI_Ssend, and MPI_Send for large messages",
    capacity=0,
)
PAIR_FIFO = TransportModel(
    "pair_fifo",
    "Each pair of ranks has one queue for both directions, and its n-th entries at both ends must be the same message; "
    "posting never blocks.",
    "isend and irecv of torch.distributed on NCCL, where torch makes a communicator for each pair of ranks",
)
COALESCED = TransportModel(
    "coalesced",
    "The messages of a rank between two computations (an overlapped pair is one) form one group. A rank's groups run "
    "in order; a group starts when its rank has posted it and ends as a whole.",
    "batch_isend_irecv of torch.distributed on one NCCL communicator",
)


def buffered(capacity: int) -> TransportModel:
    """Return the model in which a channel holds `capacity` messages whose receives are not posted yet."""
    return TransportModel(
        f"buffered({capacity})",
        "A send blocks while n messages of its channel are sent and no receive is posted for them.",
        "MPI_Send for small messages, and any queue with room for n messages",
        capacity=capacity,
    )


MODELS = (POSTED, RENDEZVOUS, buffered(1), PAIR_FIFO, COALESCED)
"""Every model. What passes `rendezvous` passes every `buffered(n)` and `posted`: a buffer only takes waits away."""


def find_transports(name: str) -> tuple[TransportModel, ...]:
    """Return the model of this name, or every one for `all`.

    Raises:
        ConfigError: for another name, with the nearest one and the list.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{described(name)}; expected one of {_names()}", key="transport")
    known = {model.name: model for model in MODELS}
    if name == ALL:
        return MODELS
    if name in known:
        return (known[name],)
    sized = _BUFFERED.match(name)
    if sized is None:
        hint = nearest(name, [*known, ALL])
        raise ConfigError(f"unknown transport {shortened(name)}; known: {_names()}.{hint}", key="transport")
    capacity = _CAPACITY.fullmatch(sized[1])
    if capacity is None:
        raise ConfigError(
            f"{shortened(name)}; expected a number of messages from 1 to 999999999, as in 'buffered(2)'. "
            "Without a buffer the transport is 'rendezvous'",
            key="transport",
        )
    return (buffered(int(capacity[1])),)


def _names() -> str:
    return ", ".join([*(model.name.replace("(1)", "(n)") for model in MODELS), ALL])
