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

How many replicas have a gradient of a parameter is summed with the gradients, behind those that are packed. One that
none has used gets none.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.gradient_sums import dense
from penstock.execute.parameters.layout import Launched, ParameterLayout, StageParts
from penstock.execute.replicas.first_replica import SavedBuffers, Share
from penstock.execute.replicas.lane import ReplicaLane

LARGE_BYTES = 2**20
"""From here on, a gradient is summed where it is."""


class Summed(ParameterLayout):
    """The layout of a unit."""

    launches = True

    def __init__(
        self, stages: Mapping[int, StageParts], gradients: GradientStore, tied: Collection[int], lane: ReplicaLane
    ) -> None:
        """`stages` are those of the unit; `tied` are ids of parameters that other ranks of the pipeline hold too."""
        self._stages = stages
        self._gradients = gradients
        self._tied = tied
        self._lane = lane
        self._buffers = {stage: SavedBuffers(parts.modules) for stage, parts in stages.items()}
        self._is_synced = False
        self._reduced_anyway: Collection[int] = ()
        self._parts: set[int] = set()
        """Ids of parameters whose gradients are of this replica alone, as behind a step within no_sync()."""
        self._missing: Counter[int] = Counter()
        """By id of a parameter that is trained, the stages whose backwards are not over; copies count once."""

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Begin a step; unless `is_synced`, gradients stay of this replica alone, but for tied ones.

        Those are summed over the ranks of the pipeline in each step, and so over the replicas before.
        """
        if not is_training:
            return
        self._is_synced = is_synced
        self._reduced_anyway = self._tied if sums_tied else ()
        copies = {tuple(map(id, parts.modules)): parts for parts in self._stages.values()}
        held = [[each for each in parts.parameters() if each.requires_grad] for parts in copies.values()]
        self._missing = Counter(id(parameter) for parameters in held for parameter in parameters)
        if self._lane.transport.rank > 0:
            kept = self._parts.union(self._tied)
            self._leave_sums_to_first(each for parameters in held for each in parameters if id(each) not in kept)
        trained = self._missing.keys() - self._tied
        self._parts = self._parts - trained if is_synced else self._parts | trained

    def reduce(self, stage: int, *, is_last: bool) -> Launched | None:
        """Start to sum what the replicas have of a stage's gradients; return None where there is nothing to sum."""
        if not is_last:
            return None
        parameters = [each for each in self._stages[stage].parameters() if id(each) in self._missing]
        self._missing.subtract(map(id, parameters))
        due = [
            each
            for each in parameters
            if self._missing[id(each)] == 0 and (self._is_synced or id(each) in self._reduced_anyway)
        ]
        if self._is_synced:  # and what has been frozen since it was trained within no_sync()
            frozen = [each for each in self._stages[stage].parameters() if id(each) in self._parts]
            self._parts.difference_update(map(id, frozen))
            due += frozen
        packed = [_Packed(own, self._gradients, self._lane) for own in self._gradients.by_type(due)]
        buffers = self._buffers[stage].now() if self._is_synced else []
        if not packed and not buffers:
            return None
        exchange = None
        if packed:
            summed = [buffer for each in packed for buffer in each.buffers]
            exchange = self._lane.sum(summed, lambda sums: _unpack(packed))
        return Launched(self._lane, exchange, Share(self._lane.transport, buffers))

    def end_failed_step(self) -> None:
        self._lane.forget()

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

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: GradientStore, lane: ReplicaLane) -> None:
        self._gradients = gradients
        self._lane = lane
        like = gradients.like(parameters[0])
        # By what is the same on all replicas: whether one has a gradient, and how it lies, may differ.
        is_large = [_is_large(each, like, lane.transport.num_ranks) for each in parameters]
        self._small = [each for each, large in zip(parameters, is_large, strict=True) if not large]
        self._large = [each for each, large in zip(parameters, is_large, strict=True) if large]
        sizes = [*(each.numel() for each in self._small), len(parameters)]
        packed = lane.room_for(sum(sizes), like)
        *places, self._uses = packed[: sum(sizes)].split_with_sizes(sizes)
        self._places = [place.view(each.shape) for place, each in zip(places, self._small, strict=True)]
        with torch.no_grad():
            self._uses.fill_(1)  # for a copy from the host, it would wait for its device
            for index, (place, parameter) in enumerate(zip(self._places, self._small, strict=True)):
                self._fill(place, gradients.of(parameter), index)
            self._sums = [self._of_large(each, len(self._small) + index) for index, each in enumerate(self._large)]
        self.buffers = [packed, *(each.view(-1) for each in self._sums)]

    def unpack(self) -> None:
        """Put the sums in the place of this rank's own gradients."""
        uses = self._uses.tolist()
        with torch.no_grad():
            for parameter, total, num_uses in zip(
                [*self._small, *self._large], [*self._places, *self._sums], uses, strict=True
            ):
                if num_uses:
                    self._put(parameter, total)
        self._lane.keep(self.buffers[0])

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
        own = self._gradients.of(parameter)
        if own is None or own.is_sparse:
            room = torch.empty_like(parameter, dtype=total.dtype, requires_grad=False)
            self._gradients.put(parameter, room.copy_(total))
        elif own.data_ptr() != total.data_ptr():
            own.detach().copy_(total)


def _is_large(parameter: nn.Parameter, like: Tensor, num_replicas: int) -> bool:
    """Whether its gradient is summed in place: large enough, and cut into equal parts without a rest."""
    num_elements = parameter.numel()
    return num_elements * like.element_size() >= LARGE_BYTES and num_elements % num_replicas == 0


def _unpack(packed: Sequence[_Packed]) -> None:
    for each in packed:
        each.unpack()
