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

from penstock.checkpoints.held import Held
from penstock.execute.replicas.first_replica import PIECE_BYTES
from penstock.execute.replicas.rows import Rows
from penstock.execute.transport.protocol import Transport


def exchange_rows(
    transport: Transport, wanted: Sequence[Sequence[Held]], own: Sequence[Tensor], device: torch.device
) -> None:
    """Fill `own`, whole tensors of which this replica has copied its rows, with those of the others.

    `wanted[replica]` are the tensors that a replica writes, shared out by their rows, in an order that all agree on;
    `own` are in that of `wanted[transport.rank]`. Every replica calls it; messages are in the memory of `device`.

    Raises: PeerLost, DeadlineExceeded.
    """
    num_replicas = transport.num_ranks
    others = [replica for replica in range(num_replicas) if replica != transport.rank]
    most = max(PIECE_BYTES // num_replicas, 1)
    leaving = {peer: _pieces([each.local for each in wanted[peer]], most) for peer in others}
    coming = {peer: _pieces([_rows(whole, peer, num_replicas) for whole in own], most) for peer in others}
    while True:
        sent, awaited = _next_of(leaving), _next_of(coming)
        if not sent and not awaited:
            return
        tickets = [transport.post_send(peer, _packed(piece, device)) for peer, piece in sent.items()]
        rooms = {peer: _room(piece, device) for peer, piece in awaited.items()}
        arriving = {peer: transport.post_receive(peer, room) for peer, room in rooms.items()}
        for peer, ticket in arriving.items():
            transport.wait(ticket)
            _unpack(rooms[peer], awaited[peer])
        for ticket in tickets:
            transport.wait(ticket)


def _rows(whole: Tensor, replica: int, num_replicas: int) -> Tensor:
    rows = Rows(whole.shape, (), num_replicas).of_replica(replica)
    return whole[rows.start : rows.stop]


def _pieces(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Cut the bytes of some tensors into pieces of equal size, each a list of views."""
    piece: list[Tensor] = []
    room = most
    for tensor in tensors:
        rest = tensor.contiguous().reshape(-1).view(torch.uint8)
        while len(rest):
            piece.append(rest[:room])
            room -= len(piece[-1])
            rest = rest[len(piece[-1]) :]
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _next_of(pieces: dict[int, Iterator[list[Tensor]]]) -> dict[int, list[Tensor]]:
    """Return the next piece for each peer that has one."""
    found = {peer: next(left, None) for peer, left in pieces.items()}
    return {peer: piece for peer, piece in found.items() if piece is not None}


def _packed(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one message; it shares the memory of the piece where that is one run of bytes on this device."""
    moved = [part.to(device) for part in piece]
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def _room(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return where a message arrives: the piece itself where it can."""
    if len(piece) == 1 and piece[0].device == device:
        return piece[0]
    return torch.empty(sum(map(len, piece)), dtype=torch.uint8, device=device)


def _unpack(message: Tensor, piece: Sequence[Tensor]) -> None:
    if len(piece) == 1 and piece[0] is message:
        return
    begin = 0
    for part in piece:
        part.copy_(message[begin : begin + len(part)])
        begin += len(part)
