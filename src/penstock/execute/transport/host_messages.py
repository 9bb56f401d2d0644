"""`HostMessages`: messages between devices that go by their hosts, one after another, for steps that are rare."""

import torch
from torch import Tensor

from penstock.execute.transport.protocol import Messages, Tag, Ticket


class HostMessages:
    """A transport around another one, whose control messages carry copies of the tensors."""

    def __init__(self, transport: Messages) -> None:
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self._transport = transport
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By the serial number of a receive, its tensor and the copy on the host."""

    def post_send(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        """Send a copy of the tensor."""
        return self._transport.post_send(peer, tensor.detach().cpu(), Tag.CONTROL)

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        """Receive into a copy, which `wait` copies to the tensor."""
        copy = torch.empty_like(tensor, device="cpu")
        ticket = self._transport.post_receive(peer, copy, Tag.CONTROL)
        self._copies[ticket.serial] = tensor, copy
        return ticket

    def begin_group(self) -> None:
        """Do nothing: messages between hosts never hold each other up."""

    def end_group(self) -> None:
        """Do nothing."""

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        """Wait for a message, and copy what it has brought to the device."""
        self._transport.wait(ticket, limit_s)
        if ticket.serial in self._copies:
            tensor, copy = self._copies.pop(ticket.serial)
            tensor.copy_(copy)

    def forget(self) -> None:
        """Forget all receives, as after a failure."""
        self._copies.clear()
