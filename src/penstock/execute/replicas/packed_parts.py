"""`PackedParts`: whole gradients of one type in one buffer, so that each replica gets the sum of its rows of all.

part of replica 0                           part of replica 1
rows of a | rows of b | uses of a, of b     rows of a | rows of b | uses of a, of b
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.execute.replicas.gathered import GatheredParameter
from penstock.execute.replicas.lane import ReplicaLane


class WholeGradients(Protocol):
    """The gradients of whole parameters; `GradientStore` says more."""

    @property
    def attribute(self) -> str: ...

    def of(self, parameter: nn.Parameter) -> Tensor | None: ...

    def release(self, parameter: nn.Parameter) -> None: ...

    def like(self, parameter: nn.Parameter) -> Tensor: ...


class PackedParts:
    """Some parameters of a unit whose gradients have one type."""

    def __init__(self, parameters: Sequence[GatheredParameter], gradients: WholeGradients, lane: ReplicaLane) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._lane = lane
        self._like = gradients.like(parameters[0].whole)
        self._places: list[slice] = []
        begin = 0
        for each in parameters:
            self._places.append(slice(begin, begin + each.rows.part_elements))
            begin += each.rows.part_elements
        self._uses = slice(begin, begin + len(parameters))
        """How many replicas have a gradient of each."""

    def pack(self) -> Tensor:
        """Return a buffer of the lane with all gradients, which are dropped: [D x part]."""
        num_replicas = self._lane.transport.num_ranks
        buffer = self._lane.room_for(num_replicas * self._uses.stop, self._like)
        parts = buffer.view(num_replicas, -1)
        found = [self._gradients.of(each.whole) for each in self._parameters]
        with torch.no_grad():
            parts[:, self._uses] = 1  # a fill: for a copy from the host, it would wait for its device
            for index, (each, place, gradient) in enumerate(zip(self._parameters, self._places, found, strict=True)):
                if gradient is None:
                    parts[:, place] = 0
                    parts[:, self._uses.start + index] = 0
                else:
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    each.rows.share_out(dense, parts[:, place])
                    self._gradients.release(each.whole)
        return buffer

    def unpacked(self, total: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return the shard of each parameter that any replica has used, and its rows in the sum: a view of [part]."""
        replica = self._lane.transport.rank
        for each, place, num_uses in zip(self._parameters, self._places, total[self._uses].tolist(), strict=True):
            if num_uses:
                yield each.shard, each.rows.own_in(total[place], replica)


def parts_by_type(
    parameters: Sequence[GatheredParameter], gradients: WholeGradients, lane: ReplicaLane
) -> list[PackedParts]:
    """Put together those whose gradients have one type."""
    found: dict[torch.dtype, list[GatheredParameter]] = {}
    for each in parameters:
        found.setdefault(gradients.like(each.whole).dtype, []).append(each)
    return [PackedParts(own, gradients, lane) for own in found.values()]
