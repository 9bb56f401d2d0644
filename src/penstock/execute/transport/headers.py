"""The header of a tree of tensors: a description by which another rank makes room for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.execute.transport.protocol import Messages
from penstock.execute.values.layouts import Layout, decode_layout, encode_layout
from penstock.execute.values.tensors import memory_order, stored
from penstock.execute.values.tree import flatten


def header_of(tree: Any) -> tuple[Tensor, Tensor]:
    """Return the length of a tree's header, and the header, as bytes."""
    header = encode_layout(tree)
    return torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)


def receive_header(transport: Messages, peer: int, device: torch.device) -> Layout:
    """Wait for the two parts of a header, which travel between tensors on `device`. Raises: PeerLost."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    transport.wait(transport.post_receive(peer, length))
    header = torch.empty(int(length), dtype=torch.uint8, device=device)
    transport.wait(transport.post_receive(peer, header))
    return decode_layout(header.cpu().numpy().tobytes())


def stored_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree as they lie in memory."""
    return [stored(tensor, memory_order(tensor)) for tensor in tensors_of(flatten(tree)[0])]


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """Return those leaves of a tree that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
