"""The forms of a loss: values that a loss function may return, and how they are read.

tensor                                 the loss, without dimensions or of shape [1]
{"name": tensor, ...}                  named losses; their sum is trained
(sum, weight)                          the loss is sum / weight
LossOutput(any of these, reported=x)   x is handed to the caller
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.execute.values.tree import detached


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """The result of a loss function that has more to say than one number."""

    loss: Tensor | Mapping[str, Tensor]
    """The loss that is trained, or named ones whose sum is."""
    weight: float | Tensor | None = None
    """The number that `loss` is a sum over, such as that of tokens; then the loss is `loss` / `weight`, and the
    pipeline's `count` says the same of the target. None: `loss` is what it is."""
    reported: Any = None
    """Any tree of values; comes back, detached and in order of the microbatches, as `StepResult.reported`."""


ALL_TOGETHER = ""
"""Under this name stands what the auxiliary losses of a microbatch add to what is trained, with their weights."""
LossValue = Tensor | Mapping[str, Tensor] | tuple[Tensor, float | Tensor] | LossOutput


@dataclass(frozen=True, slots=True)
class LossName:
    """A loss that is reported by name, apart for every type that its values have."""

    name: str
    is_auxiliary: bool
    """Whether a layer added the loss; otherwise the loss function named it."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class LossParts:
    """The losses of one microbatch or slice, as a loss function returned them."""

    loss: Tensor
    """The loss, 0-dim, with its graph."""
    named_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Named losses, 0-dim, with their graphs; empty where the loss function names none. Those whose count is not 0 add
    up to the loss."""
    reported: Any = None
    """The values that the loss function reported, without graph."""


def takes_weight(loss: Callable[..., LossValue]) -> bool:
    """Whether a loss function wants to be told the factor of its loss: by a keyword-only parameter `weight`.

    A `weight` that can be given by position is another matter, such as that of classes in torch's own losses.
    """
    while isinstance(loss, partial) and "weight" in loss.keywords:
        loss = loss.func  # the signature of a partial shows every keyword that it gives as keyword-only
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError):  # a built-in function tells nothing
        return False
    return "weight" in parameters and parameters["weight"].kind is inspect.Parameter.KEYWORD_ONLY


def read_loss(value: object, microbatch: int, count: float | Mapping[str, float] | None = None) -> LossParts:
    """Read what a loss function returned for a microbatch; `count` is what the pipeline's `count` said of its target.

    A weight of 0 gives losses of 0, whatever the sum.

    Raises:
        PipelineError: it is none of the forms, its weight is not the count, or its names are not those of the count.
    """
    if count is not None and isinstance(count, Mapping):  # to ask takes as long as a send, and most have no count
        return _read_counted_losses(value, microbatch, count)
    if isinstance(value, Tensor):
        return LossParts(scalar_loss(value, microbatch))
    output: Any = value
    if not isinstance(output, LossOutput):
        output = LossOutput(*output) if isinstance(output, tuple) and len(output) == 2 else LossOutput(output)
    divisor = None if output.weight is None else _checked_weight(output.weight, microbatch, count)
    reported = detached(output.reported)
    if not isinstance(output.loss, Mapping):
        return LossParts(_divided(scalar_loss(output.loss, microbatch), divisor), reported=reported)
    named_losses = {name: _divided(scalar_loss(loss, microbatch, name), divisor) for name, loss in output.loss.items()}
    _require_names(named_losses, microbatch)
    return LossParts(_sum_of(list(named_losses.values())), named_losses, reported)


def _read_counted_losses(value: object, microbatch: int, counts: Mapping[str, float]) -> LossParts:
    """Read named losses that have counts of their own: means over what is counted under their names."""
    output = value if isinstance(value, LossOutput) else LossOutput(value)  # type: ignore[arg-type]
    is_named = isinstance(output.loss, Mapping)
    names = list(output.loss) if isinstance(output.loss, Mapping) else []
    if not is_named or set(names) != counts.keys() or output.weight is not None:
        returned = f"losses named {names}" if is_named else f"a {type(output.loss).__name__}"
        raise PipelineError(
            f"microbatch {microbatch}: the loss function returned {returned}"
            f"{'' if output.weight is None else ' with a weight'}, but count a dict with the names {list(counts)}; "
            "return a dict with these names, where each loss is the mean over what is counted under its name"
        )
    losses = {
        name: scalar_loss(loss, microbatch, name) for name, loss in cast(Mapping[str, Tensor], output.loss).items()
    }
    # The mean of nothing may be NaN, which the sum with the other losses would be, too.
    counted_losses = [loss for name, loss in losses.items() if counts[name]]
    loss = _sum_of(counted_losses) if counted_losses else torch.zeros_like(next(iter(losses.values())))
    return LossParts(loss, losses, detached(output.reported))


def _sum_of(losses: Sequence[Tensor]) -> Tensor:
    return sum(losses[1:], start=losses[0])


def scalar_loss(loss: object, microbatch: int, name: str | None = None) -> Tensor:
    """Return what a loss function gave for a microbatch as a 0-dim tensor; one of shape [1] is reshaped.

    Raises:
        PipelineError: it is something else.
    """
    if isinstance(loss, Tensor) and tuple(loss.shape) in ((), (1,)) and loss.is_floating_point():
        return loss if loss.dim() == 0 else loss.reshape(())
    description = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        description = f"a tensor of shape {tuple(loss.shape)} and type {str(loss.dtype).removeprefix('torch.')}"
    raise PipelineError(
        f"microbatch {microbatch}: the loss function returned {description}{'' if name is None else f' as {name!r}'}; "
        "expected a floating-point tensor without dimensions, or of shape [1]. Reduce it with .mean() or .sum(). A "
        "dict of named losses, a pair (sum, weight) and a penstock.LossOutput are taken, too"
    )


def _checked_weight(weight: object, microbatch: int, count: float | None) -> float:
    """Return a weight as a number, if it is the count."""
    place = f"microbatch {microbatch}: the loss function returned a sum with the weight"
    if isinstance(weight, Mapping):
        raise PipelineError(
            f"{place} {weight!r}; expected a number, what the sum is over. To have values reported, return "
            "penstock.LossOutput(loss, reported=...)"
        )
    if not isinstance(weight, (int, float, Tensor)) or (isinstance(weight, Tensor) and weight.numel() != 1):
        raise PipelineError(f"{place} {weight!r}; expected a number, or a tensor that holds one")
    number = float(weight)
    if count is None:
        raise PipelineError(
            f"{place} {number:g}, but the weights of all microbatches must be known before the first backward; give "
            "Pipeline count=..., a function that counts a target as the loss function does, or, with "
            "reduction='sum', return the sum alone"
        )
    if not math.isclose(number, count, rel_tol=1e-9):
        raise PipelineError(
            f"{place} {number:g}, but count returned {count:g} for its target; make both count the same"
        )
    return number


def _require_names(named_losses: Mapping[str, Tensor], microbatch: int) -> None:
    if not named_losses or not all(isinstance(name, str) and name for name in named_losses):
        raise PipelineError(
            f"microbatch {microbatch}: the loss function returned a dict of losses with the names "
            f"{list(named_losses)}; expected one or more, each a text that is not empty"
        )


def _divided(loss: Tensor, divisor: float | None) -> Tensor:
    if divisor is None:
        return loss
    # 0 / 0 is not a number, and what nothing counts in adds nothing.
    return loss / divisor if divisor else torch.zeros_like(loss)
