"""The loss that a model brings along, as one of transformers does."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from penstock.execute.losses.chunked import chunked_cross_entropy
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.tails import unwrapped

LayerType = TypeVar("LayerType")


class LayersWithLoss(Sequence[LayerType]):
    """The layers of a model with its own loss, which a pipeline takes where it is given none."""

    shifts_labels = False
    """Whether the loss compares a label with the output at the position before it."""

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a microbatch, a mean over what `count` counts."""

    @abstractmethod
    def count(self, target: Any) -> int:
        """Return how many targets of a microbatch its loss is the mean of."""


def with_model_loss(layers: Any, loss: Loss | None, options: Mapping[str, Any]) -> tuple[Loss | None, dict[str, Any]]:
    """Return the loss and the options of a pipeline, with those of the model where the caller gives no loss.

    The model's count goes with its loss alone: a loss of the caller may be a mean over something else. The chunked
    cross entropy, unless the caller says how it shifts labels, is the model's loss computed in another way.
    """
    if not isinstance(layers, LayersWithLoss):
        return loss, dict(options)
    if loss is None:
        model_loss: Loss = layers.loss
    elif unwrapped(loss) is chunked_cross_entropy and "shift" not in getattr(loss, "keywords", {}):
        model_loss = partial(loss, shift=layers.shifts_labels)
    else:
        return loss, dict(options)
    is_mean = options.get("reduction", "mean") == "mean"
    return model_loss, {**({"count": layers.count} if is_mean else {}), **options}
