"""Transports: how messages get from one rank to another."""

from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.protocol import Ticket, Transport
from penstock.execute.transport.torch_dist import TorchTransport

__all__ = ["LocalTransport", "Ticket", "TorchTransport", "Transport"]
