"""Sums of one gradient over several ranks that hold copies of its parameter.

Dense gradients are summed along the holders, one group of parameters after another. Each holder adds its own to what
those before it have added up, and the last one sends the sum to all. So a rank needs room for one group beside its
gradients, and every holder gets the same bits: the sum in the order of the holders.

    holder 0 --own--> holder 1 --sum of two--> holder 2        then the sum of all: holder 2 --> holders 0 and 1

A sparse gradient, as of `nn.Embedding(sparse=True)`, is small: all holders send each other the rows that it touches. A
parameter that no holder has used gets no gradient, as in one process, where weight decay leaves it alone. One whose
uses all give sparse gradients gets a sparse one, as `torch.optim.SparseAdam` wants it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.execute.transport.protocol import Messages, Ticket, wait_for_all
from penstock.execute.values.tensors import in_pieces

_ABSENT = -2
_DENSE = -1
"""In the place of how many rows a sparse gradient has."""


def sum_over(
    transport: Messages, ranks: Sequence[int], gradients: list[Tensor | None], likes: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor | None]]:
    """Yield the index and the sum of each gradient; a collective of `ranks`, which hold as many in the same order.

    `likes` have the shape and type of dense gradients, and need no memory. Each sum takes the place of its
    gradient: `gradients` is emptied on the way.
    """
    gradients[:] = [_settled(gradient) for gradient in gradients]
    sizes = _exchange_sizes(transport, ranks, gradients, likes[0].device)
    dense = []
    for index, rows in enumerate(zip(*sizes, strict=True)):
        if _DENSE in rows:
            dense.append(index)  # with the others: one dense gradient makes all dense
        elif max(rows) == _ABSENT:
            yield index, None
        else:
            gradient, gradients[index] = gradients[index], None
            yield index, _sum_of_sparse(transport, ranks, gradient, likes[index], rows)
    yield from _sums_of_dense(transport, ranks, dense, gradients, likes)


def added(accumulated: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Return what was accumulated before with a sum on top of it; sparse if both are.

    A dense one stays in its memory, as in autograd: a caller may have put a view of a flat buffer there.
    """
    if accumulated is None or total is None:
        return total if accumulated is None else accumulated
    if accumulated.is_sparse:
        return accumulated + total if total.is_sparse else torch.add(dense(accumulated), total, out=total)
    return accumulated.add_(total)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its values written out."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _settled(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with each row once, if it is sparse in rows; any other sparse one as a dense one."""
    if gradient is None or not gradient.is_sparse:
        return gradient
    return gradient.coalesce() if gradient.sparse_dim() == 1 else gradient.to_dense()


def _exchange_sizes(
    transport: Messages, ranks: Sequence[int], gradients: Sequence[Tensor | None], device: torch.device
) -> list[list[int]]:
    """Return, per holder, of its gradients: `_ABSENT`, `_DENSE`, or how many rows a sparse one has."""
    local_sizes = torch.tensor([_size_of(gradient) for gradient in gradients], device=device)
    rooms = [local_sizes if rank == transport.rank else torch.empty_like(local_sizes) for rank in ranks]
    _exchange(transport, ranks, [[room] for room in rooms])
    return [room.tolist() for room in rooms]


def _size_of(gradient: Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    return len(gradient.values()) if gradient.is_sparse else _DENSE


def _exchange(transport: Messages, ranks: Sequence[int], parts: Sequence[Sequence[Tensor]]) -> None:
    """Send this rank's parts to all other holders, and fill theirs."""
    peer_parts = [(rank, tensors) for rank, tensors in zip(ranks, parts, strict=True) if rank != transport.rank]
    local_parts = parts[ranks.index(transport.rank)]
    transport.begin_group()  # each holder sends first, so alone a send would wait for a receive behind another send
    sends = [transport.post_send(peer, tensor) for peer, _ in peer_parts for tensor in local_parts]
    receives = [transport.post_receive(peer, tensor) for peer, tensors in peer_parts for tensor in tensors]
    transport.end_group()
    wait_for_all(transport, [*receives, *sends])


def _sum_of_sparse(
    transport: Messages, ranks: Sequence[int], gradient: Tensor | None, like: Tensor, sizes: Sequence[int]
) -> Tensor:
    parts = []
    for rank, size in zip(ranks, sizes, strict=True):
        if rank == transport.rank and gradient is not None:
            parts.append([gradient.indices(), gradient.values()])
        else:
            rows = torch.empty((1, max(size, 0)), dtype=torch.int64, device=like.device)
            parts.append([rows, like.new_empty((rows.shape[1], *like.shape[1:]))])
    _exchange(transport, ranks, parts)
    all_rows = torch.cat([rows for rows, _ in parts], dim=1)
    all_values = torch.cat([values for _, values in parts])
    return torch.sparse_coo_tensor(all_rows, all_values, like.shape, check_invariants=False).coalesce()


def _sums_of_dense(
    transport: Messages,
    ranks: Sequence[int],
    indices: Sequence[int],
    gradients: list[Tensor | None],
    likes: Sequence[Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the sum over `ranks` of each dense gradient in `indices`.

    Each of `ranks`, two or more, holds a copy of the same parameters, and runs this generator. The gradients go along
    the ranks as a chain: the first rank sends its own to the second, each rank adds its own to what it receives and
    sends on the result, and the last rank sends the sums to all. So every rank gets the same bits. A missing gradient
    (None) counts as zeros. `likes` have the shapes and dtypes; `gradients[index]` is freed before its sum is yielded.
    """
    position, last_rank = ranks.index(transport.rank), ranks[-1]
    # A group of gradients goes along the chain together. It takes no more memory than the largest parameter.
    groups = list(in_pieces(indices, lambda index: likes[index].nbytes, max(like.nbytes for like in likes)))
    first_sends: list[Ticket] = []

    def send_first(group: Sequence[int]) -> list[Ticket]:
        return [transport.post_send(ranks[1], _or_zeros(gradients[index], likes[index])) for index in group]

    if position == 0 and groups:
        first_sends = send_first(groups[0])
    for number, group in enumerate(groups):
        # The sums need memory of their own. Two gradients may be views of one tensor, as autograd hands out, so that a
        # sum in the place of one gradient would change the other one.
        sums = [likes[index].new_empty(likes[index].shape) for index in group]
        next_sends: list[Ticket] = []
        if position > 0:
            wait_for_all(transport, [transport.post_receive(ranks[position - 1], total) for total in sums])
            for index, total in zip(group, sums, strict=True):
                _add(total, gradients[index])
        if transport.rank == last_rank:
            wait_for_all(transport, [transport.post_send(peer, total) for peer in ranks[:-1] for total in sums])
        else:
            if position > 0:
                wait_for_all(transport, [transport.post_send(ranks[position + 1], total) for total in sums])
            # The first rank sends a group before it has the sums of the one before, so that the next ranks can add it
            # up while these are on their way. Launched together with their receives, it does not hold them up.
            transport.begin_group()
            if position == 0 and number + 1 < len(groups):
                next_sends = send_first(groups[number + 1])
            receives = [transport.post_receive(last_rank, total) for total in sums]
            transport.end_group()
            wait_for_all(transport, receives)
        # A transport holds a sent tensor until its send was waited for.
        wait_for_all(transport, first_sends)
        first_sends = next_sends
        for index, total in zip(group, sums, strict=True):
            gradients[index] = None
            yield index, total


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(like.shape) if gradient is None else dense(gradient)


def _add(total: Tensor, gradient: Tensor | None) -> None:
    torch.add(total, 0 if gradient is None else dense(gradient), out=total)  # -0.0 + 0 is 0, as with zeros
