"""`Summed`: parameters that every replica holds as a whole, and whose gradients are summed over the replicas.

    REDUCE_GRAD   packs the gradients of a stage, starts one reduction of them, and goes on
    its wait      puts the sums in the place of this rank's own gradients

A reduction takes what came since the one before it, in this way: a gradient that is summed already belongs to the first
replica, and the others set theirs to zeros before they add to it. So the sum over the replicas is what was summed
before plus all that came since, and callers may zero or scale gradients between steps as they like.

    step                      .grad of replica 0        of replica 1          sum
    1, summed                 s                         s
    2, within no_sync()       s + a                     b
    3, summed                 s + a + c                 b + d                 s + a + b + c + d

How many replicas have a gradient of a parameter is summed with the gradients, behind them in the same buffer. One that
none has used gets none.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.execute.replicas.first_replica import SavedBuffers, Share, share
from penstock.execute.replicas.lane import ReplicaLane, Serial


class Gradients(Protocol):
    """Where the gradients are; `GradientStore` says more."""

    def of(self, parameter: nn.Parameter) -> Tensor | None: ...

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None: ...

    def like(self, parameter: nn.Parameter) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class StageParts:
    """What a stage holds."""

    parameters: Callable[[], Sequence[nn.Parameter]]
    """Those that it holds now."""
    modules: Sequence[nn.Module]


class Summed:
    """The layout of a unit."""

    launches = True

    def __init__(
        self, stages: Mapping[int, StageParts], gradients: Gradients, tied: Collection[int], lane: ReplicaLane
    ) -> None:
        """`stages` are those of the unit; `tied` are ids of parameters that other ranks of the pipeline hold too."""
        self._stages = stages
        self._gradients = gradients
        self._tied = tied
        self._lane = lane
        self._buffers = {stage: SavedBuffers(parts.modules) for stage, parts in stages.items()}
        self._is_synced = False
        self._reduced_anyway: Collection[int] = ()
        self._holds_parts = False
        """Whether gradients are of this replica alone, as behind a step within no_sync()."""
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
        if not self._holds_parts and self._lane.transport.rank > 0:
            self._leave_sums_to_first(each for parameters in held for each in parameters if id(each) not in self._tied)
        self._holds_parts = not is_synced

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self, stage: int, *, is_last: bool) -> "_SumTicket | None":
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
        packed = [_Packed(own, self._gradients, self._lane) for own in _by_kind(due, self._gradients)]
        buffers = self._buffers[stage].now() if self._is_synced else []
        if not packed and not buffers:
            return None
        exchange = self._lane.sum([each.buffer for each in packed]) if packed else None
        return _SumTicket(self._lane, exchange, packed, share(self._lane.transport, buffers))

    def after_step(self) -> None: ...

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
    """Gradients of one type in one buffer: [gradients | how many replicas have each | padding]."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Gradients, lane: ReplicaLane) -> None:
        self._parameters = parameters
        self._gradients = gradients
        like = gradients.like(parameters[0])
        num_elements = sum(parameter.numel() for parameter in parameters)
        self.buffer = lane.room_for(num_elements + len(parameters), like)
        self._places, self._uses = self._cut(num_elements)
        found = [gradients.of(parameter) for parameter in parameters]
        with torch.no_grad():
            self._uses.fill_(1)  # for a copy from the host, it would wait for its device
            for index, (place, gradient) in enumerate(zip(self._places, found, strict=True)):
                if gradient is None:
                    place.zero_()
                    self._uses[index] = 0
                else:
                    place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def unpack(self) -> None:
        """Put the sums in the place of this rank's own gradients."""
        uses = self._uses.tolist()
        with torch.no_grad():
            for parameter, place, num_uses in zip(self._parameters, self._places, uses, strict=True):
                if num_uses:
                    self._put(parameter, place)

    def _put(self, parameter: nn.Parameter, total: Tensor) -> None:
        own = self._gradients.of(parameter)
        if own is None or own.is_sparse:
            dense = torch.empty_like(parameter, dtype=total.dtype, requires_grad=False)
            self._gradients.put(parameter, dense.copy_(total))
        else:
            own.detach().copy_(total)

    def _cut(self, num_elements: int) -> tuple[list[Tensor], Tensor]:
        places, begin = [], 0
        for parameter in self._parameters:
            end = begin + parameter.numel()
            places.append(self.buffer[begin:end].view(parameter.shape))
            begin = end
        return places, self.buffer[num_elements : num_elements + len(self._parameters)]


class _SumTicket:
    """A reduction that is under way."""

    def __init__(self, lane: ReplicaLane, exchange: Serial | None, packed: Sequence[_Packed], buffers: Share) -> None:
        self._lane = lane
        self._exchange = exchange
        self._packed = packed
        self._shared_buffers = buffers

    def wait(self) -> None:
        """Return when the gradients are the sums. Raises: PeerLost, DeadlineExceeded."""
        if self._exchange is not None:
            self._lane.complete(self._exchange)
            for packed in self._packed:
                packed.unpack()
                self._lane.keep(packed.buffer)
        self._shared_buffers.wait()


def _by_kind(parameters: Sequence[nn.Parameter], gradients: Gradients) -> list[list[nn.Parameter]]:
    """Put together those whose gradients have one type."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(gradients.like(parameter).dtype, []).append(parameter)
    return list(found.values())
