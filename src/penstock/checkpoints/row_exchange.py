"""Brings each replica the rows of the tensors that it writes, in pieces, so that little is held twice.

    replica 0     writes a: rows of a <── replica 1      sends its rows of b
    replica 1     writes b: rows of b <── replica 0      sends its rows of a

One replica sends another one row of bytes, of any number of tensors; both cut it into the same pieces.
Guarantees: a rank holds at most twice `PIECE_BYTES` for it. All that replicas hold has been agreed on before.
Relies on: nothing changes the tensors meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from penstock.checkpoints.local_tensors import LocalTensor
from penstock.execute.replicas.first_replica import PIECE_BYTES
from penstock.execute.replicas.rows import Rows
from penstock.execute.transport.protocol import Transport, wait_for_all


def exchange_rows(
    transport: Transport,
    tensors_by_replica: Sequence[Sequence[LocalTensor]],
    targets: Sequence[Tensor],
    device: torch.device,
) -> None:
    """Fill `targets`, which have this replica's rows already, with the rows of the other replicas.

    Each tensor is split by rows over the replicas, and one replica writes it whole into a checkpoint.
    `tensors_by_replica[replica]` has this replica's rows (`local`) of the tensors that `replica` writes, in an order
    that all replicas agree on; `targets` are in the order of `tensors_by_replica[transport.rank]`. Every replica calls
    it. Messages are in the memory of `device`, and cut into pieces of bounded size.

    Raises: PeerLost, DeadlineExceeded.
    """
    num_replicas = transport.num_ranks
    peers = [replica for replica in range(num_replicas) if replica != transport.rank]
    piece_bytes = max(PIECE_BYTES // num_replicas, 1)
    pieces_to_send = {
        peer: _pieces([tensor.local for tensor in tensors_by_replica[peer]], piece_bytes) for peer in peers
    }
    pieces_to_fill = {
        peer: _pieces([_rows(target, peer, num_replicas) for target in targets], piece_bytes) for peer in peers
    }
    # Sender and receiver cut the same bytes alike, so one round of the loop sends a piece and receives its counterpart.
    while True:
        outgoing, incoming = _next_pieces(pieces_to_send), _next_pieces(pieces_to_fill)
        if not outgoing and not incoming:
            return
        sends = [transport.post_send(peer, _packed_message(piece, device)) for peer, piece in outgoing.items()]
        buffers = {peer: _receive_buffer(piece, device) for peer, piece in incoming.items()}
        receives = {peer: transport.post_receive(peer, buffer) for peer, buffer in buffers.items()}
        for peer, ticket in receives.items():
            transport.wait(ticket)
            _unpack(buffers[peer], incoming[peer])
        wait_for_all(transport, sends)


def _rows(full_tensor: Tensor, replica: int, num_replicas: int) -> Tensor:
    """Return the view of a whole tensor's rows that a replica holds."""
    rows = Rows(full_tensor.shape, (), num_replicas).of_replica(replica)
    return full_tensor[rows.start : rows.stop]


def _pieces(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the bytes of some tensors in pieces of equal size, but for the last one; a piece is a list of views."""
    piece: list[Tensor] = []
    free_bytes = piece_bytes
    for tensor in tensors:
        remaining = tensor.contiguous().reshape(-1).view(torch.uint8)
        while len(remaining):
            view = remaining[:free_bytes]
            piece.append(view)
            free_bytes -= len(view)
            remaining = remaining[len(view) :]
            if free_bytes == 0:
                yield piece
                piece, free_bytes = [], piece_bytes
    if piece:
        yield piece


def _next_pieces(pieces: dict[int, Iterator[list[Tensor]]]) -> dict[int, list[Tensor]]:
    """Return the next piece for each peer that has one."""
    next_pieces = {peer: next(remaining, None) for peer, remaining in pieces.items()}
    return {peer: piece for peer, piece in next_pieces.items() if piece is not None}


def _packed_message(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a piece as one message, which shares its memory where it is a single view on this device."""
    parts = [part.to(device) for part in piece]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _receive_buffer(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the buffer for a message of this piece: the piece itself where it is one view on this device."""
    if len(piece) == 1 and piece[0].device == device:
        return piece[0]
    return torch.empty(sum(map(len, piece)), dtype=torch.uint8, device=device)


def _unpack(message: Tensor, piece: Sequence[Tensor]) -> None:
    """Copy a message into the views of its piece, unless it has arrived in them."""
    if len(piece) == 1 and piece[0] is message:
        return
    begin = 0
    for part in piece:
        part.copy_(message[begin : begin + len(part)])
        begin += len(part)
