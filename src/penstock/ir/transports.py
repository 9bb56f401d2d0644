"""The named models of how messages travel between ranks: what a lowering keeps to and a proof assumes.

In every model a computation waits for the messages that it consumes, and a tied reduction and an optimizer step wait
for all their ranks. A channel is the in-order queue of messages from one rank to one other.
"""

from dataclasses import dataclass

from penstock.errors import ConfigError, described, nearest, shortened

ALL = "all"
"""Stands for every model."""


@dataclass(frozen=True, slots=True)
class TransportModel:
    """One model; its name is what `check`, `lower` and the command line take."""

    name: str
    meaning: str
    backend: str
    """Which backend obeys it."""

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
)
PAIR_FIFO = TransportModel(
    "pair_fifo",
    "Each pair of ranks has one queue for both directions, and its n-th entries at both ends must be the same message; "
    "posting never blocks.",
    "isend and irecv of torch.distributed on NCCL, where torch makes a communicator for each pair of ranks",
)
COALESCED = TransportModel(
    "coalesced",
    "The messages of a rank between two computations (an overlapped pair is one) form one group, or those that the "
    "program marks as one. A rank's groups run in order; a group starts when its rank has posted it and ends as a "
    "whole.",
    "batch_isend_irecv of torch.distributed on one NCCL communicator; Penstock with messages='coalesced'",
)


MODELS = (POSTED, RENDEZVOUS, PAIR_FIFO, COALESCED)
"""Every model. A program that passes `rendezvous` passes with any buffer, and `posted`: a buffer only takes waits away.
"""
_NAMES = ", ".join([*(model.name for model in MODELS), ALL])


def find_transports(name: str) -> tuple[TransportModel, ...]:
    """Return the model of this name, or every one for `all`.

    Raises:
        ConfigError: for another name, with the nearest one and the list.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{described(name)}; expected one of {_NAMES}", key="transport")
    model_of_name = {model.name: model for model in MODELS}
    if name == ALL:
        return MODELS
    if name in model_of_name:
        return (model_of_name[name],)
    hint = nearest(name, [*model_of_name, ALL])
    if name.startswith("buffered"):
        hint = " Use 'rendezvous': a program that passes it passes with any buffer"
    raise ConfigError(f"unknown transport {shortened(name)}; known: {_NAMES}.{hint}", key="transport")
