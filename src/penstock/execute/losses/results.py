"""What a step gives back; and brings the outputs of a step to one rank."""

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import PipelineError, nearest
from penstock.execute.batch.microbatch import merge_outputs
from penstock.execute.batch.step import Step
from penstock.execute.batch.stream import DataTimes
from penstock.execute.transport.messages import Messenger
from penstock.ir.program import Program
from penstock.placement import Placement

_Loss = TypeVar("_Loss")


class MicrobatchLosses(list[Tensor]):
    """The losses of the microbatches, in order."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not -len(self) <= index < len(self):
            there = f"there are those of microbatches 0 to {len(self) - 1}" if self else "there are none"
            raise PipelineError(
                f"there is no loss of microbatch {index}: {there}. Only a step with a loss function and a target has "
                "losses, one for each of the schedule's microbatches"
            )
        return super().__getitem__(index)


class NamedLosses(dict[str, _Loss]):
    """Losses by name."""

    def __missing__(self, name: object) -> _Loss:
        there = f"there are {', '.join(map(repr, self))}" if self else "there are none with a name"
        raise PipelineError(
            f"there is no loss {name!r}: {there}.{nearest(str(name), self)} Names come from a loss function that "
            "returns a dict, and from the AuxiliaryLoss of a layer"
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back, on every rank alike but for the outputs."""

    loss: Tensor | None
    """0-dim, the loss of the whole batch as the loss function has it; None without a loss function."""
    losses: MicrobatchLosses
    """0-dim, one per microbatch in order, before weighting."""
    outputs: Any = None
    """The merged outputs of the last layer, if asked for, on the rank of the last stage (with two routes: of the first
    route's); else None."""
    named_losses: NamedLosses[Tensor] = field(default_factory=NamedLosses)
    """0-dim, of the whole batch: what the loss function named, each weighted as the loss is, and what layers added to
    an `AuxiliaryLoss`, before its weight. An auxiliary loss is weighted by rows for a mean, whatever `count` says."""
    named_microbatch_losses: NamedLosses[MicrobatchLosses] = field(default_factory=NamedLosses)
    """The same per microbatch in order; 0 where a microbatch has none of that name."""
    total: Tensor | None = None
    """0-dim, what the gradients are of: `loss` plus each auxiliary loss times its own weight; None without a loss."""
    reported: list[Any] = field(default_factory=list)
    """What the loss function reported (`LossOutput`), one value per microbatch in order (where microbatches are cut, a
    list with one per slice), on the rank that computed their losses; empty elsewhere, and where nothing was."""
    data_times: DataTimes | None = None
    """What the data of a `Stream` cost this rank in this step; None for a batch that was there as a whole."""


def reported_by_microbatch(step: Step) -> list[Any]:
    """Return what the loss function reported of the microbatches whose losses this rank computed."""
    if not step.reported:
        return []
    own = sorted({microbatch for microbatch, _ in step.losses})
    rows = [[step.reported.get((microbatch, index)) for index in range(step.num_slices)] for microbatch in own]
    return [row[0] if step.num_slices == 1 else row for row in rows]


def collector_of(placement: Placement) -> int:
    """Return the rank that gets the outputs: that of the last stage of the first route."""
    return placement.rank_of_stage[placement.routes[0][-1]]


def collect_outputs(messenger: Messenger, step: Step, program: Program, rank: int) -> None:
    """Move the outputs of all routes to the collector, one microbatch after another."""
    holder_of_route = [program.placement.rank_of_stage[route[-1]] for route in program.placement.routes]
    collector = holder_of_route[0]
    for place in product(range(len(step.slices)), range(step.num_slices)):
        holder = holder_of_route[program.route_of_microbatch[place[0]]]
        if rank == holder != collector:
            messenger.send_described(collector, step.outputs.pop(place))
        elif rank == collector != holder:
            step.outputs[place] = messenger.receive_described(holder)


def merge_slices_and_microbatches(step: Step, merge: Any, merge_slices: Any, slice_dim: int) -> Any:
    """Put the outputs of a step together: first those of the slices of a microbatch, then those of the microbatches."""
    wholes = []
    for microbatch in range(len(step.slices)):
        parts = [step.outputs[microbatch, index] for index in range(step.num_slices)]
        spec = merge_slices or partial(_join_slices, dim=slice_dim)
        wholes.append(parts[0] if len(parts) == 1 else merge_outputs(parts, spec, part="slice"))
    return merge_outputs(wholes, merge)


def _join_slices(values: list[Any], *, dim: int) -> Any:
    """One tensor along the sequence where it has one, else along a new last dimension; what is no tensor, as a list."""
    if not all(isinstance(value, Tensor) for value in values):
        return values
    has_sequence = -values[0].dim() <= dim < values[0].dim()
    return torch.cat(values, dim=dim) if has_sequence else torch.stack(values, dim=-1)
