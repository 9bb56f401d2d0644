"""The loss that a model brings along, as one of transformers does."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from penstock.execute.losses.loss import Loss

LayerType = TypeVar("LayerType")


class LayersWithLoss(Sequence[LayerType]):
    """The layers of a model with its own loss, which a pipeline takes where it is given none."""

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a microbatch, a mean over what `count` counts."""

    @abstractmethod
    def count(self, target: Any) -> int:
        """Return how many targets of a microbatch its loss is the mean of."""


def with_model_loss(layers: Any, loss: Loss | None, options: Mapping[str, Any]) -> tuple[Loss | None, dict[str, Any]]:
    """Return the loss and the options of a pipeline, with those of the model where the caller gives no loss.

    The model's count goes with its loss alone: a loss of the caller may be a mean over something else.
    """
    if loss is not None or not isinstance(layers, LayersWithLoss):
        return loss, dict(options)
    is_mean = options.get("reduction", "mean") == "mean"
    return layers.loss, {**({"count": layers.count} if is_mean else {}), **options}
