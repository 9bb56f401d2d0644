"""Brings the losses of a step from the ranks of the last stages to every rank, and the outputs to one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from penstock.execute.loss import combine_losses
from penstock.execute.messages import Messenger
from penstock.execute.microbatch import merge_outputs
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.placement import Placement

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back, on every rank alike but for the outputs."""

    loss: Tensor | None
    """0-dim, the loss of the whole batch; None without a loss function."""
    losses: list[Tensor]
    """0-dim, one per microbatch, before weighting."""
    outputs: Any = None
    """The merged outputs of the last layer, if asked for, on the rank of the last stage (with two routes: of the first
    route's); else None."""


def share_losses(transport: Transport, step: Step, device: torch.device) -> StepResult:
    """Give every rank every microbatch's loss; also the end of the step, which no rank passes alone."""
    # float64 holds every loss exactly, and adding the zeros of the other ranks changes nothing.
    table = torch.zeros(4, len(step.slices), step.num_slices, dtype=torch.float64, device=device)
    for (microbatch, index), loss in step.losses.items():
        table[0, microbatch, index] = loss
        table[1, microbatch, index] = 1 + _DTYPES.index(loss.dtype)
        table[2, microbatch, index] = step.shares.fractions[microbatch][index]
        table[3, microbatch, index] = step.shares.weights[microbatch]
    transport.all_reduce(table)
    codes, fractions, weights = table[1:].tolist()
    if not all(map(all, codes)):
        return StepResult(None, [])
    dtypes = [_DTYPES[int(code) - 1] for code, *_ in codes]
    losses = [_of_microbatch(*each) for each in zip(table[0], dtypes, fractions, strict=True)]
    return StepResult(combine_losses(losses, [weight for weight, *_ in weights]), losses)


def _of_microbatch(values: Tensor, dtype: torch.dtype, fractions: Sequence[float]) -> Tensor:
    losses = list(values.to(dtype))
    return losses[0] if len(losses) == 1 else combine_losses(losses, fractions)


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
