"""Plain gradient accumulation on one process: the judge that every schedule is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.keywords import check_keywords, run_layers
from penstock.execute.loss import Count, Loss, combine_losses, microbatch_weights, scalar_loss
from penstock.execute.microbatch import BatchSpec, Microbatch, split_batch
from penstock.execute.tree import map_leaves


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`loss` of the batch; `losses` and `outputs` per microbatch. No tensor keeps its graph."""

    loss: Tensor
    losses: list[Tensor]
    outputs: list[Any]


def reference_step(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss,
    num_microbatches: int,
    reduction: str = "mean",
    count: Count | None = None,
    allow_ragged: bool = False,
    specs: BatchSpec | None = None,
) -> ReferenceResult:
    """Run forward, loss and backward of one microbatch after another; gradients are added to `.grad`.

    A microbatch of weight 0 runs no backward: it has nothing to add.
    """
    microbatches = split_batch(
        args, kwargs, target, num_microbatches=num_microbatches, specs=specs, allow_ragged=allow_ragged
    )
    weights = microbatch_weights(microbatches, reduction, count)
    check_keywords(modules, kwargs, len(args))
    losses, outputs = [], []
    for microbatch, weight in zip(microbatches, weights, strict=True):
        output, microbatch_loss = _forward(modules, microbatch, loss)
        if weight:
            torch.autograd.backward(microbatch_loss * weight)
        losses.append(microbatch_loss.detach())
        outputs.append(map_leaves(_detached, output))
    return ReferenceResult(combine_losses(losses, weights), losses, outputs)


@torch.no_grad()
def reference_evaluate(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss,
    num_microbatches: int,
    reduction: str = "mean",
    count: Count | None = None,
    allow_ragged: bool = False,
    specs: BatchSpec | None = None,
) -> ReferenceResult:
    """Run forward and loss only; modules stay in the mode (train or eval) in which they are."""
    microbatches = split_batch(
        args, kwargs, target, num_microbatches=num_microbatches, specs=specs, allow_ragged=allow_ragged
    )
    weights = microbatch_weights(microbatches, reduction, count)
    check_keywords(modules, kwargs, len(args))
    pairs = [_forward(modules, microbatch, loss) for microbatch in microbatches]
    losses = [microbatch_loss for _, microbatch_loss in pairs]
    return ReferenceResult(combine_losses(losses, weights), losses, [output for output, _ in pairs])


def _forward(modules: Sequence[nn.Module], microbatch: Microbatch, loss: Loss) -> tuple[Any, Tensor]:
    output = run_layers(modules, microbatch.args, microbatch.kwargs)
    return output, scalar_loss(loss(output, microbatch.target), microbatch.index)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
