"""The memory of a tensor: in which order its dimensions lie, and which part of it if it is spread over ranks.

A tensor that crosses between ranks keeps the order of its dimensions in memory: channels last, say.

An order lists the dimensions from the outermost in memory to the innermost; the empty one is the order in which they
are written. A tensor with gaps or repeated elements (a slice of a wider one, an expanded one) has none to keep: it
arrives in the order in which its dimensions are written.

DTensors are told by their methods, and torch.distributed.tensor is imported where one is made: that takes a second,
which a model without them need not pay.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError
from penstock.execute.undocumented import address_of, num_holders

T = TypeVar("T")
Order = tuple[int, ...]
_DTENSORS = "torch.distributed.tensor"


def memory_order(tensor: Tensor) -> Order:
    """Return the order of a tensor's dimensions in memory."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else ()


def stored(tensor: Tensor, order: Order) -> Tensor:
    """Return a view with the dimensions in the order in which they lie in memory."""
    return tensor.permute(order) if order else tensor


def written_out(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: torch conjugates and negates some only when it reads them, and
    waits as late for what a collective is still filling.

    Raises:
        PipelineError: for a DTensor, whose values are on several ranks.
    """
    if is_dtensor(tensor):
        raise PipelineError(
            f"a DTensor of shape {tuple(tensor.shape)} cannot travel between stages; expected a tensor of this rank: "
            "let the stage's last layer return it by to_local() or full_tensor(), as "
            "RowwiseParallel(use_local_output=True) does"
        )
    tensor = local_part(tensor)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


def kind_that_cannot_travel(tensor: Tensor) -> str:
    """Name what a tensor is beside its values, shape and type, which no other rank could rebuild; empty if nothing.

    A parameter arrives as a plain tensor. What a collective is still filling is waited for, and DTensors are refused
    where a message is written.
    """
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor of type {str(tensor.dtype).removeprefix('torch.')}"
    kind = type(tensor)
    if kind is Tensor or issubclass(kind, nn.Parameter) or hasattr(tensor, "wait") or is_dtensor(tensor):
        return ""
    return f"a {kind.__module__}.{kind.__qualname__}, a subclass of tensors"


def empty_in_order(shape: Sequence[int], order: Order, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape, without values, whose dimensions lie in memory in this order."""
    if not order:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_permuted(tuple(shape), order, dtype=dtype, device=device)


def is_order(order: Sequence[object], num_dims: int) -> bool:
    """Whether this is an order of so many dimensions; the empty one is."""
    indices = sorted(dim for dim in order if type(dim) is int)
    return not order or (len(order) == num_dims and indices == list(range(num_dims)))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`."""
    return type(tensor) is not Tensor and hasattr(tensor, "to_local")


def is_replicated(tensor: Tensor) -> bool:
    """Whether each rank has the whole of a DTensor."""
    return all(placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, once it has arrived; any other tensor as it is."""
    if type(tensor) is Tensor:  # every message asks, and to look for an attribute in vain takes its time
        return tensor
    if is_dtensor(tensor):
        with torch.no_grad():  # where it is a look at an attribute
            tensor = tensor.to_local().detach()  # type: ignore[attr-defined]
    wait = getattr(tensor, "wait", None)  # of what a collective is still filling
    part: Tensor = tensor if wait is None else wait()
    return part


def as_shard(rows: Tensor, mesh: DeviceMesh, shape: torch.Size, strides: Sequence[int]) -> Tensor:
    """Return the DTensor of which this rank has these rows, `Shard(0)`, or the whole of a scalar, in their memory."""
    dtensors = import_module(_DTENSORS)
    placement = dtensors.Shard(0) if shape else dtensors.Replicate()
    dtensor: Tensor = dtensors.DTensor.from_local(
        rows, mesh, [placement], run_check=False, shape=shape, stride=tuple(strides)
    )
    return dtensor


def part_like(reference: Tensor, part: Tensor) -> Tensor:
    """Return a DTensor of which this rank has `part`, and which lies as the DTensor `reference` does."""
    spread: Any = reference
    dtensor: Tensor = type(reference).from_local(  # type: ignore[attr-defined]
        part, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )
    return dtensor


def memory_of(tensor: Tensor) -> int:
    """Return the address of the storage that holds a strided tensor, or this rank's part of one."""
    return address_of(local_part(tensor).untyped_storage())


def in_own_memory(gradient: Tensor) -> Tensor:
    """Return the gradient of an input, as a copy if somebody else holds its memory, who might change it."""
    # Of subclasses, such as DTensor, nobody knows who holds their parts.
    is_alone = type(gradient) is Tensor and (gradient.layout is not torch.strided or num_holders(gradient) == 1)
    return gradient if is_alone else gradient.clone()


def in_pieces(items: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Put consecutive items together while they have at most so many bytes; one that has more is by itself."""
    piece: list[T] = []
    num_bytes = 0
    for item in items:
        item_bytes = bytes_of(item)
        if piece and num_bytes + item_bytes > max_bytes:
            yield piece
            piece, num_bytes = [], 0
        piece.append(item)
        num_bytes += item_bytes
    if piece:
        yield piece
