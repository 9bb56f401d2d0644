"""Brings the outputs of a step to the ranks that want them, behind the loop, and joins them (part 5 of a step)."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from penstock.execute.batch.microbatch import merge_outputs
from penstock.execute.control.agreement import AgreedStep
from penstock.execute.control.error_notes import note_place
from penstock.execute.step import Step
from penstock.execute.transport.messages import Messenger
from penstock.ir.program import Program
from penstock.placement import Placement


def ranks_of_outputs(agreed: AgreedStep, placement: Placement) -> Sequence[int]:
    """Return the ranks that get the outputs: those that were named, or that of the first route's last stage.

    The latter gets them only if it asked for them itself.
    """
    if agreed.output_ranks:
        return agreed.output_ranks
    rank = placement.rank_of_stage[placement.routes[0][-1]]
    return (rank,) if rank in agreed.wanting_outputs else ()


def collect_outputs(messenger: Messenger, step: Step, program: Program, rank: int) -> None:
    """Move the outputs of all routes to the ranks that get them, one microbatch after another."""
    if not step.output_ranks:
        return
    holder_of_route = [program.placement.rank_of_stage[route[-1]] for route in program.placement.routes]
    # One after another and in one order on all ranks: these messages go on the channels of the step, behind its own.
    for place in product(range(step.losses.num_microbatches), range(step.losses.num_slices)):
        holder = holder_of_route[program.route_of_microbatch[place[0]]]
        for receiver in step.output_ranks:
            if rank == holder != receiver:
                _send(messenger, receiver, step.outputs[place])
            elif rank == receiver != holder:
                step.outputs[place] = messenger.receiver.receive_described(holder)
        if rank not in step.output_ranks:
            step.outputs.pop(place, None)


def _send(messenger: Messenger, receiver: int, outputs: Any) -> None:
    try:
        messenger.sender.send_described(receiver, outputs)
    except Exception as error:
        note_place(error, "the outputs for other ranks")
        raise


def merged_outputs(step: Step, merge: Any, merge_slices: Any, slice_dim: int) -> Any:
    """Put the outputs of a step together: of the slices of a microbatch, then of microbatches; None without any."""
    if not step.outputs:
        return None
    spec = merge_slices or partial(_join_slices, dim=slice_dim)
    wholes = []
    try:
        for microbatch in range(step.losses.num_microbatches):
            parts = [step.outputs[microbatch, index] for index in range(step.losses.num_slices)]
            wholes.append(parts[0] if len(parts) == 1 else merge_outputs(parts, spec, part="slice"))
        return merge_outputs(wholes, merge)
    except Exception as error:
        note_place(error, "the merge of the outputs")
        raise


def _join_slices(values: list[Any], *, dim: int) -> Any:
    """One tensor along the sequence where it has one, else along a new last dimension; what is no tensor, as a list."""
    if not all(isinstance(value, Tensor) for value in values):
        return values
    has_sequence = -values[0].dim() <= dim < values[0].dim()
    return torch.cat(values, dim=dim) if has_sequence else torch.stack(values, dim=-1)
