"""`Summed`: parameters that every replica holds as a whole, and whose gradients are summed over the replicas.

    REDUCE_GRAD   packs the small gradients of a stage, starts one reduction of all of them, and goes on
    its wait      puts the sums in the place of this rank's own gradients

A large gradient is summed where it is: a copy would cost as much as half of what is sent.

A reduction takes what came since the one before it, in this way: a gradient that is summed already belongs to the first
replica, and the others set theirs to zeros before they add to it. So the sum over the replicas is what was summed
before plus all that came since, and callers may zero or scale gradients between steps as they like.

    step                      .grad of replica 0        of replica 1          sum
    1, summed                 s                         s
    2, within no_sync()       s + a                     b
    3, summed                 s + a + c                 b + d                 s + a + b + c + d

Where gradients are averaged, all replicas keep what was summed before: the mean of equal values is that value. The sum
is divided by the number of replicas, by which their losses were multiplied.

How many replicas have a gradient of a parameter is summed with the gradients, behind those that are packed. One that
none has used gets none.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.gradient_sums import dense
from penstock.execute.parameters.layout import Launched, ParameterLayout, StageParts
from penstock.execute.replicas.exchanges import ReplicaExchanges
from penstock.execute.replicas.first_replica import SavedBuffers, Share

LARGE_BYTES = 2**20
"""Bytes from which on a gradient is summed where it is."""


@dataclass(eq=False)
class Summed(ParameterLayout):
    """The layout of a unit."""

    launches = True

    _stages: Mapping[int, StageParts]
    _gradients: GradientStore
    _tied_ids: Collection[int]
    """Ids of parameters that other ranks of the pipeline hold too."""
    _exchanges: ReplicaExchanges
    _num_averaged: int = 1
    """Number of replicas over which gradients are averaged; 1 where they are summed."""
    _is_synced: bool = False
    _always_reduced_ids: Collection[int] = ()
    _replica_only_ids: set[int] = field(default_factory=set)
    """Ids of parameters whose gradients are of this replica alone, as behind a step within no_sync()."""
    _num_pending_stages: Counter[int] = field(default_factory=Counter)
    """Number of stages whose backwards are not over, by the id of a trained parameter; copies count once."""

    def __post_init__(self) -> None:
        self._buffers = {stage: SavedBuffers(parts.modules) for stage, parts in self._stages.items()}

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Begin a step; unless `is_synced`, gradients stay of this replica alone, but for tied ones.

        Those are summed over the ranks of the pipeline in each step, and so over the replicas before.
        """
        if not is_training:
            return
        self._is_synced = is_synced
        self._always_reduced_ids = self._tied_ids if sums_tied else ()
        copies = {tuple(map(id, parts.modules)): parts for parts in self._stages.values()}
        trained = [param for parts in copies.values() for param in parts.parameters() if param.requires_grad]
        self._num_pending_stages = Counter(map(id, trained))
        if self._exchanges.transport.rank > 0 and self._num_averaged == 1:
            unsummed_ids = self._replica_only_ids.union(self._tied_ids)
            self._leave_sums_to_first(param for param in trained if id(param) not in unsummed_ids)
        untied_ids = self._num_pending_stages.keys() - self._tied_ids
        if is_synced:
            self._replica_only_ids = self._replica_only_ids - untied_ids
        else:
            self._replica_only_ids = self._replica_only_ids | untied_ids

    def reduce(self, stage: int, *, is_last: bool) -> Launched | None:
        """Start to sum what the replicas have of a stage's gradients; return None where there is nothing to sum."""
        if not is_last:
            return None
        parameters = self._stages[stage].parameters()
        trained = [param for param in parameters if id(param) in self._num_pending_stages]
        self._num_pending_stages.subtract(map(id, trained))
        complete_params = [param for param in trained if self._num_pending_stages[id(param)] == 0]
        due_params = [p for p in complete_params if self._is_synced or id(p) in self._always_reduced_ids]
        if self._is_synced:  # and what has been frozen since it was trained within no_sync()
            frozen = [param for param in parameters if id(param) in self._replica_only_ids]
            self._replica_only_ids.difference_update(map(id, frozen))
            due_params += frozen
        packed = [_Packed(params, self._gradients, self._exchanges) for params in self._gradients.by_type(due_params)]
        buffers = self._buffers[stage].now() if self._is_synced else []
        if not packed and not buffers:
            return None
        exchange = None
        if packed:
            buffers_to_sum = [buffer for packed_gradients in packed for buffer in packed_gradients.buffers]
            exchange = self._exchanges.sum(buffers_to_sum, lambda sums: self._take_sums(packed))
        return Launched(self._exchanges, exchange, Share(self._exchanges.transport, buffers))

    def end_failed_step(self) -> None:
        self._exchanges.forget()

    def _take_sums(self, packed: "Sequence[_Packed]") -> None:
        for packed_gradients in packed:
            if self._num_averaged > 1:
                packed_gradients.divide(self._num_averaged)
            packed_gradients.unpack()

    def _leave_sums_to_first(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = self._gradients.of(parameter)
            if gradient is None:
                continue
            if gradient.is_sparse:
                self._gradients.put(parameter, None)
            else:
                gradient.detach().zero_()  # in place: a caller may have put a view of a flat buffer there


class _Packed:
    """Gradients of one type: small ones in one buffer, [gradients | how many replicas have each | padding]; large ones.

    `buffers` are what is to be summed.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], gradients: GradientStore, exchanges: ReplicaExchanges
    ) -> None:
        self._gradients = gradients
        self._exchanges = exchanges
        like = gradients.like(parameters[0])
        # The choice depends on shapes alone, which all replicas have alike. Whether a parameter has a gradient, and how
        # that lies in memory, may differ between them.
        is_large = [_is_large(parameter, like, exchanges.transport.num_ranks) for parameter in parameters]
        self._small = [parameter for parameter, large in zip(parameters, is_large, strict=True) if not large]
        self._large = [parameter for parameter, large in zip(parameters, is_large, strict=True) if large]
        sizes = [*(parameter.numel() for parameter in self._small), len(parameters)]
        packed = exchanges.buffer_for(sum(sizes), like)
        *places, self._uses = packed[: sum(sizes)].split_with_sizes(sizes)
        self._places = [place.view(parameter.shape) for place, parameter in zip(places, self._small, strict=True)]
        with torch.no_grad():
            self._uses.fill_(1)  # a copy from the host would wait for the device
            for index, (place, parameter) in enumerate(zip(self._places, self._small, strict=True)):
                self._fill(place, gradients.of(parameter), index)
            self._sums = [self._of_large(param, index) for index, param in enumerate(self._large, len(self._small))]
        self.buffers = [packed, *(total.view(-1) for total in self._sums)]

    def divide(self, divisor: int) -> None:
        """Divide the sums, and not how many replicas have them."""
        for total in (*self._places, *self._sums):
            total.div_(divisor)

    def unpack(self) -> None:
        """Put the sums in the place of this rank's own gradients."""
        uses = self._uses.tolist()
        with torch.no_grad():
            for parameter, total, num_uses in zip(
                [*self._small, *self._large], [*self._places, *self._sums], uses, strict=True
            ):
                if num_uses:
                    self._put(parameter, total)
        self._exchanges.keep(self.buffers[0])

    def _fill(self, place: Tensor, gradient: Tensor | None, index: int) -> None:
        if gradient is None:
            place.zero_()
            self._uses[index] = 0
        else:
            place.copy_(dense(gradient))

    def _of_large(self, parameter: nn.Parameter, index: int) -> Tensor:
        """Return the gradient itself, where it can be summed in place, or a copy."""
        gradient = self._gradients.of(parameter)
        if gradient is not None and not gradient.is_sparse and gradient.is_contiguous():
            return gradient.detach()
        room = torch.empty(parameter.shape, dtype=self._uses.dtype, device=self._uses.device)
        self._fill(room, gradient, index)
        return room

    def _put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Put a sum where the gradient is, if it is not there."""
        gradient = self._gradients.of(parameter)
        if gradient is None or gradient.is_sparse:
            room = torch.empty_like(parameter, dtype=total.dtype, requires_grad=False)
            self._gradients.put(parameter, room.copy_(total))
        elif gradient.data_ptr() != total.data_ptr():
            gradient.detach().copy_(total)


def _is_large(parameter: nn.Parameter, like: Tensor, num_replicas: int) -> bool:
    """Whether its gradient is summed in place: large enough, and cut into equal parts without a rest."""
    num_elements = parameter.numel()
    return num_elements * like.element_size() >= LARGE_BYTES and num_elements % num_replicas == 0
