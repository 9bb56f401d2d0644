"""`ReadyTags`: a send that blocks until its receive is posted, as MPI_Ssend does."""

import torch

from penstock.execute.transport.protocol import Messages, Tag, Ticket, wait_for_all


class ReadyTags:
    """Tells each sender when its receive is posted: so a send blocks until then, as MPI_Ssend does.

    The n-th tag from a peer is for the n-th message to it, since sends and receives of a channel are in one order. In
    steps with headers receives are not posted at their rows, so there are no tags.
    """

    def __init__(self, transport: Messages) -> None:
        self._transport = transport
        self._sent: list[Ticket] = []

    def note_receive(self, peer: int) -> None:
        """Tell a peer that the receive of its next message is posted."""
        self._sent.append(self._transport.post_send(peer, torch.zeros(1, dtype=torch.uint8), Tag.CONTROL))

    def await_receive(self, peer: int) -> None:
        """Wait until a peer has posted the receive of the next message to it."""
        tag = torch.zeros(1, dtype=torch.uint8)
        self._transport.wait(self._transport.post_receive(peer, tag, Tag.CONTROL))

    def finish(self) -> None:
        """Wait until all tags have left."""
        wait_for_all(self._transport, self._sent)
        self._sent.clear()

    def forget(self) -> None:
        """Forget all tags."""
        self._sent.clear()
