"""Tied parameters: one parameter that several stages hold, as one object on a rank and as copies on several ranks.

Two layers may share a parameter, and with two routes every stage has a copy that runs the other direction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PartitionError
from penstock.execute.control.copy_digests import CopyDigest
from penstock.execute.parameters.gradient_store import StoredGradients
from penstock.execute.parameters.gradient_sums import sum_over
from penstock.execute.replicas.first_replica import SavedBuffers
from penstock.execute.transport.protocol import Messages, wait_for_all
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.undocumented import has_hooks
from penstock.execute.values.tensors import local_part

_LAZY = "without a shape before its first input"
_DIM_FACTOR = 1_000_003
"""Tells dimensions apart in a digest: without it, a square and its transpose would have the same."""


@dataclass(frozen=True, slots=True, eq=False)
class TiedCopy:
    """This rank's copies of parameters that other ranks hold too, reduced together.

    `ranks` are all holders, the owner first. Every holder ends a step with the same gradients, bit for bit: the sum of
    all contributions in the order of `ranks`, on top of what was accumulated before the step. `layers` are copies as a
    whole: they start with the owner's buffers, and saved ones (running statistics) are the owner's after each step.
    """

    parameters: Mapping[str, nn.Parameter]
    """Copies by their names on this rank; the other holders have as many, in the same order."""
    ranks: Sequence[int]
    layers: Sequence[nn.Module] = ()

    def share_values(self, transport: Messages) -> None:
        """Copy the owner's values and buffers to all other holders."""
        self._take_from_owner(transport, [*self.parameters.values(), *self._buffers()])

    def refuse_hooks(self) -> None:
        """Refuse hooks that would see a part of a gradient only: those of a parameter, not of a copy of a whole stage.

        Raises:
            PartitionError: naming the parameter.
        """
        for name, parameter in () if self.layers else self.trained().items():
            if has_hooks(parameter):
                raise PartitionError(
                    f"{name!r} is tied over ranks and has a hook, which would see the gradient of this rank's uses "
                    "alone; register it on what the layers return, or change the gradient after the step"
                )

    def reduce(self, transport: Messages, store: StoredGradients | None) -> None:
        """Sum this step's gradients over all holders, and take the owner's statistics; without a store, these alone.

        A frozen parameter has no gradient, and one that nobody used neither.
        """
        if store is not None and (parameters := list(self.trained().values())):
            gradients = list(map(store.of, parameters))
            for index, total in sum_over(transport, self.ranks, gradients, list(map(store.like, parameters))):
                store.put_sum(parameters[index], total)
        self._take_from_owner(transport, SavedBuffers(self.layers).now())

    def describe(self) -> list[list[str]]:
        """Name every tensor that is kept equal, each with what must be alike on all holders."""
        described_parameters = [[name, _describe(parameter)] for name, parameter in self.parameters.items()]
        return described_parameters + [["a buffer", _describe(buffer)] for buffer in self._buffers()]

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that need a gradient now, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.layers for buffer in layer.buffers()]

    def _take_from_owner(self, transport: Messages, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors of the owner to all other holders."""
        owner = self.ranks[0]
        values = [local_part(tensor.detach()) for tensor in tensors]
        if transport.rank == owner:
            wait_for_all(transport, [transport.post_send(peer, value) for peer in self.ranks[1:] for value in values])
            return
        for value in values:
            received = torch.empty_like(value, memory_format=torch.contiguous_format)
            transport.wait(transport.post_receive(owner, received))
            value.copy_(received)


def copy_digests(copies: Mapping[int, TiedCopy]) -> list[CopyDigest]:
    """Return the digests of this rank's copies of tied parameters, for `require_equal_digests`."""
    return [
        (group, place, name, _bits_of(local_part(parameter.detach())))
        for group, copy in copies.items()
        for place, (name, parameter) in enumerate(copy.parameters.items())
        if _has_plain_bits(parameter)
    ]


def _has_plain_bits(tensor: Tensor) -> bool:
    plain = local_part(tensor.detach())
    return type(plain) is Tensor and plain.layout is torch.strided and not (plain.is_quantized or plain.is_meta)


def _bits_of(tensor: Tensor) -> int:
    """Return a sum of all elements' bits as whole numbers, which almost every other order of them changes.

    The orders that do not change it leave the sum of each row and column, as of a permutation of an identity.
    It is computed where the tensor lies, and takes as much memory as the tensor is long along a dimension.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    rows = real.resolve_neg().reshape(real.shape or (1,))
    if rows.element_size() > torch.int32.itemsize:
        # As halves, since sums of the whole would lose their highest bits: all signs, or all exponents, could change.
        rows = rows.contiguous().view(torch.int32)
    bits = rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[rows.element_size()])
    bits = bits[:, None] if bits.dim() == 1 else bits
    dims = range(bits.dim())
    # The sums along all dimensions but one are weighted with odd numbers: to swap two of them changes the result.
    sums_by_dim = [bits.sum(tuple(set(dims) - {dim}), dtype=torch.int64) for dim in dims]
    totals = [int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()) for sums in sums_by_dim]
    return sum(total * _DIM_FACTOR**dim for dim, total in enumerate(totals))


def refuse_renormalized(named_layers: Iterable[tuple[str, nn.Module]], copies: Iterable[TiedCopy]) -> None:
    """Refuse tables that a lookup changes in place: on each rank the rows that it looks up itself.

    Raises:
        PartitionError: naming the layer.
    """
    tied = {id(parameter) for copy in copies for parameter in copy.parameters.values()}
    for name, layer in named_layers:
        for module in layer.modules():
            is_changed = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
            if is_changed and id(module.weight) in tied:
                raise PartitionError(
                    f"layer {name!r} has an {type(module).__name__} with max_norm={module.max_norm:g} whose weight "
                    "other ranks hold too: each lookup would scale rows of this rank's copy alone. Leave max_norm out "
                    "and limit the rows after each optimizer step, with torch.renorm on every rank, or split the model "
                    "so that one rank holds all uses"
                )


def described_copies(copies: Mapping[int, TiedCopy]) -> dict[str, list[list[str]]]:
    """Return the description of this rank's copies, which all holders must have alike, by the number of a group."""
    return {str(group): copy.describe() for group, copy in copies.items()}


def require_equal_kinds(descriptions: Sequence[object], names: RankNames) -> None:
    """Make sure that all holders of a tied parameter have described the same kind of tensor.

    Raises:
        PartitionError: on every rank alike, naming the ranks and what differs.
    """
    first: dict[str, tuple[int, list[list[str]]]] = {}
    for rank, rank_description in enumerate(descriptions):
        for group, tensors in rank_description.items() if isinstance(rank_description, dict) else ():
            owner, expected = first.setdefault(group, (rank, tensors))
            _require_alike(names[owner], expected, names[rank], tensors)


def _require_alike(owner: str, expected: list[list[str]], rank: str, description: list[list[str]]) -> None:
    if len(expected) != len(description):
        raise PartitionError(
            f"{owner} holds {len(expected)} parameters and buffers of a stage, but {rank} holds {len(description)} "
            "of its copy; let a layer build the same module on every rank"
        )
    for (name, text), (other_name, other_text) in zip(expected, description, strict=True):
        if _LAZY in (text, other_text):
            raise PartitionError(
                f"{name!r} is {text} on {owner}, so the copy on {rank} cannot be made equal; give its layer "
                "its sizes when it is built"
            )
        if text != other_text:
            raise PartitionError(
                f"a tied parameter is {text} on {owner} ({name}), but {other_text} on {rank} ({other_name}); "
                "tie parameters of one shape and type, all trained or all frozen"
            )


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return _LAZY
    state = "trained" if tensor.requires_grad else "frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, {state}"
