"""All replicas take from the first one: parameters and buffers when a pipeline is made, buffers after a step."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.execute.transport.protocol import Ticket, Transport, wait_for_all
from penstock.execute.values.tensors import in_pieces, local_part

PIECE_BYTES = 2**24
"""The most bytes of one message; its tensors are held twice while it is under way."""


_ALIGNMENT = 16
"""Bytes to whose multiple each tensor in a message begins, so that it can be seen as its own type."""


class Share:
    """Tensors that are on their way from the first replica to the others, in one message; every replica makes one."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor]) -> None:
        self._transport = transport
        self._tensors = tensors if transport.num_ranks > 1 and any(tensor.numel() for tensor in tensors) else ()
        self._tickets: list[Ticket] = []
        if not self._tensors:
            return
        self._packed = torch.zeros(sum(map(_room_of, tensors)), dtype=torch.uint8, device=tensors[0].device)
        if transport.rank == 0:
            with torch.no_grad():
                for tensor, place in self._places():
                    place.copy_(tensor.detach())
            self._tickets = [transport.post_send(peer, self._packed) for peer in range(1, transport.num_ranks)]
        else:
            self._tickets = [transport.post_receive(0, self._packed)]

    def wait(self) -> None:
        """Return when this rank has what the first replica has. Raises: PeerLost, DeadlineExceeded."""
        wait_for_all(self._transport, self._tickets)
        if self._transport.rank > 0:
            with torch.no_grad():
                for tensor, place in self._places():
                    tensor.detach().copy_(place)

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor with its place in the message, seen as its own type and shape."""
        begin = 0
        for tensor in self._tensors:
            yield tensor, self._packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += _room_of(tensor)


def share_all(transport: Transport, tensors: Iterable[Tensor]) -> None:
    """Give all replicas what the first one has in these tensors, piece by piece. Raises: PeerLost, DeadlineExceeded."""
    for piece in in_pieces(tensors, lambda tensor: tensor.nbytes, PIECE_BYTES):
        Share(transport, piece).wait()


class SavedBuffers:
    """The buffers of a stage that a weights file holds: running statistics, not tables that are computed anew."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._holders: list[tuple[nn.Module, str]] = []
        for root in modules:
            state = root.state_dict()
            saved_addresses = {_address(tensor) for tensor in state.values() if isinstance(tensor, Tensor)}
            for name, buffer in root.named_buffers():
                # Some wrappers, such as those for checkpointing, save a buffer under another name: addresses tell.
                if name in state or _address(buffer) in saved_addresses:
                    path, _, buffer_name = name.rpartition(".")
                    self._holders.append((root.get_submodule(path), buffer_name))

    def now(self) -> list[Tensor]:
        """Return the buffers that the modules hold now."""
        buffers = [getattr(module, name, None) for module, name in self._holders]
        return [buffer for buffer in buffers if isinstance(buffer, Tensor)]


def _address(tensor: Tensor) -> int:
    """Return where the values of a tensor begin; what is not strided, or has no shape yet, has no such place."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    return local_part(tensor).data_ptr()


def _room_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
