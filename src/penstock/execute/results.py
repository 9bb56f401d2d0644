"""Brings the losses of a step from the ranks of the last stages to every rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.execute.loss import combine_losses
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back, on every rank alike but for the outputs."""

    loss: Tensor | None
    """0-dim, the loss of the whole batch; None without a loss function."""
    losses: list[Tensor]
    """0-dim, one per microbatch, before weighting."""
    outputs: Any = None
    """The merged outputs of the last layer, if asked for, on the rank of the last stage; else None."""


def share_losses(transport: Transport, step: Step, num_microbatches: int, device: torch.device) -> StepResult:
    """Give every rank every microbatch's loss; also the end of the step, which no rank passes alone."""
    # float64 holds every loss exactly, and adding the zeros of the other ranks changes nothing.
    table = torch.zeros(3, num_microbatches, dtype=torch.float64, device=device)
    for microbatch, loss in step.losses.items():
        table[0, microbatch] = loss
        table[1, microbatch] = step.weights[microbatch]
        table[2, microbatch] = 1 + _DTYPES.index(loss.dtype)
    transport.all_reduce(table)
    codes = [int(code) for code in table[2].tolist()]
    if not all(codes):
        return StepResult(None, [])
    losses = [value.to(_DTYPES[code - 1]) for value, code in zip(table[0], codes, strict=True)]
    return StepResult(combine_losses(losses, table[1].tolist()), losses)
