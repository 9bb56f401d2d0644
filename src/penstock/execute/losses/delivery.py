"""What becomes of a last stage's outputs: their loss is computed, noted, and made the beginning of the backward."""

from typing import Any

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import Place
from penstock.execute.control.error_notes import note_place, without_target
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.output import LossName, LossParts, read_loss
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.values.tree import flatten


def deliver_loss(losses: StepLosses, place: Place, outputs: Any, target: Any, *, is_training: bool) -> Tensor | None:
    """Compute and note the loss of a microbatch or slice; return where its backward begins, None without one.

    Raises:
        PipelineError: what the loss function returned is no loss, or does not depend on the outputs.
    """
    if losses.loss is None:
        return None
    factor = losses.shares.factor(*place)
    parts = _computed(losses, losses.loss, place, outputs, target, factor)
    losses.computed[place] = parts.loss.detach()
    for name, loss in parts.named.items():
        losses.note(LossName(name, False, loss.dtype), place, loss)
    if parts.reported is not None:
        losses.reported[place] = parts.reported
    if not is_training:
        return None
    if factor and not parts.loss.requires_grad and _needs_gradient(outputs):
        raise PipelineError(
            f"microbatch {place[0]}: the loss does not depend on the output any more, so nothing would be "
            "trained; compute it from the output without detach(), item() or no_grad()"
        )
    return losses.root_of(parts.loss, factor)


def _computed(losses: StepLosses, loss: Loss, place: Place, outputs: Any, target: Any, factor: float) -> LossParts:
    try:
        value = loss(outputs, target, weight=factor) if losses.takes_weight else loss(outputs, target)
    except Exception as error:
        note_place(error, without_target("the loss function", target))
        raise
    return read_loss(value, place[0], losses.shares.count(*place))


def _needs_gradient(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(tree)[0])
