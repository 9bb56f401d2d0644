"""What becomes of a last stage's outputs: their loss is computed, noted, and made the beginning of the backward."""

from typing import Any

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.step import Place, Step
from penstock.execute.control.error_notes import note_place, without_target
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.output import LossName, LossParts, read_loss
from penstock.execute.values.tree import flatten


def deliver_loss(step: Step, place: Place, outputs: Any, target: Any, *, is_training: bool) -> Tensor | None:
    """Compute and note the loss of a microbatch or slice; return where its backward begins, None without one.

    Raises:
        PipelineError: what the loss function returned is no loss, or does not depend on the outputs.
    """
    if step.loss is None:
        return None
    factor = step.shares.factor(*place)
    parts = _measured(step, step.loss, place, outputs, target, factor)
    step.losses[place] = parts.loss.detach()
    for name, loss in parts.named.items():
        step.note(LossName(name, False, loss.dtype), place, loss)
    if parts.reported is not None:
        step.reported[place] = parts.reported
    if not is_training:
        return None
    if factor and not parts.loss.requires_grad and _needs_gradient(outputs):
        raise PipelineError(
            f"microbatch {place[0]}: the loss does not depend on the output any more, so nothing would be "
            "trained; compute it from the output without detach(), item() or no_grad()"
        )
    return step.root_of(parts.loss, factor)


def _measured(step: Step, loss: Loss, place: Place, outputs: Any, target: Any, factor: float) -> LossParts:
    try:
        value = loss(outputs, target, weight=factor) if step.tells_weight else loss(outputs, target)
    except Exception as error:
        note_place(error, without_target("the loss function", target))
        raise
    return read_loss(value, place[0], step.shares.count(*place))


def _needs_gradient(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(tree)[0])
