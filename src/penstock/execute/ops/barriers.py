"""BARRIER: the hosts of all ranks of a pipeline wait for each other.

Every rank sends every other one an empty control message. A device may still work off what its host gave it before.
"""

from collections.abc import Iterator

import torch

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.execute.transport.protocol import Messages, Tag, wait_for_all


def barrier(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle BARRIER: wait until all ranks of the pipeline have come to their row of this barrier."""
    messenger = context.messenger
    peers = [peer for peer in range(messenger.transport.num_ranks) if peer != context.rank]

    def wait_for_ranks(step: Step) -> None:
        # Messages with headers may lie before the token on a channel. Both ends are between the same barriers, so they
        # are due by now.
        for peer in peers:
            messenger.receiver.post_waiting(peer)
        exchange_tokens(messenger.transport, peers)

    yield Bound(row, wait_for_ranks)


def exchange_tokens(transport: Messages, peers: list[int]) -> None:
    """Send each peer a byte, and wait for one of each. Raises: PeerLost, DeadlineExceeded."""
    receives = [transport.post_receive(peer, torch.zeros(1, dtype=torch.uint8), Tag.CONTROL) for peer in peers]
    sends = [transport.post_send(peer, torch.zeros(1, dtype=torch.uint8), Tag.CONTROL) for peer in peers]
    wait_for_all(transport, [*receives, *sends])
