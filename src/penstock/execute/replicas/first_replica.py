"""What all replicas take from the first one: parameters and buffers when a pipeline is made, buffers after a step."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.execute.transport.protocol import Transport

PIECE_BYTES = 2**24
"""Of what a message has at most, which is held once more for as long."""


class Share:
    """Tensors that are on their way from the first replica to the others."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor]) -> None:
        self._transport = transport
        self._tensors = tensors
        packed = _packed(tensors) if transport.num_ranks > 1 else None
        self._packed = packed
        if packed is None:
            self._tickets = []
        elif transport.rank == 0:
            self._tickets = [transport.post_send(peer, packed) for peer in range(1, transport.num_ranks)]
        else:
            self._tickets = [transport.post_receive(0, packed)]

    def wait(self) -> None:
        """Return when this rank has what the first replica has. Raises: PeerLost, DeadlineExceeded."""
        for ticket in self._tickets:
            self._transport.wait(ticket)
        if self._packed is None or self._transport.rank == 0:
            return
        begin = 0
        with torch.no_grad():
            for tensor in self._tensors:
                content = self._packed[begin : begin + tensor.nbytes].view(tensor.dtype)
                tensor.detach().copy_(content.view(tensor.shape))
                begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT = 16
"""Of each tensor in a message, so that it can be seen as its own type."""


def share(transport: Transport, tensors: Sequence[Tensor]) -> Share:
    """Begin to give all replicas what the first one has in these tensors, in one message; every replica calls it."""
    return Share(transport, tensors)


def share_all(transport: Transport, tensors: Iterable[Tensor]) -> None:
    """Give all replicas what the first one has in these tensors, piece by piece. Raises: PeerLost, DeadlineExceeded."""
    for piece in _pieces(tensors):
        share(transport, piece).wait()


class SavedBuffers:
    """The buffers of a stage that a weights file holds: running statistics, not tables that are computed anew."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._holders: list[tuple[nn.Module, str]] = []
        for module in modules:
            saved = module.state_dict()
            for name, _ in module.named_buffers():
                path, _, own = name.rpartition(".")
                if name in saved:
                    self._holders.append((module.get_submodule(path), own))

    def now(self) -> list[Tensor]:
        """Return them as the modules hold them now."""
        found = [getattr(module, name, None) for module, name in self._holders]
        return [buffer for buffer in found if isinstance(buffer, Tensor)]


def _packed(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the bytes of all tensors one after another, or None where there are none."""
    if not any(tensor.numel() for tensor in tensors):
        return None
    rooms = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    packed = torch.zeros(sum(rooms), dtype=torch.uint8, device=tensors[0].device)
    begin = 0
    with torch.no_grad():
        for tensor, room in zip(tensors, rooms, strict=True):
            place = packed[begin : begin + tensor.nbytes].view(tensor.dtype)
            place.view(tensor.shape).copy_(tensor.detach())
            begin += room
    return packed


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Put consecutive tensors together while they are small; a large one has a message of its own."""
    piece: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if piece and num_bytes + tensor.nbytes > PIECE_BYTES:
            yield piece
            piece, num_bytes = [], 0
        piece.append(tensor)
        num_bytes += tensor.nbytes
    if piece:
        yield piece
