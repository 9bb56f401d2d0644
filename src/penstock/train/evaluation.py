"""The loss on text that the model was not trained on."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from penstock.execute.batch.stream import as_part
from penstock.pipeline import Pipeline
from penstock.train.data.batches import Batch


def mean_loss(
    pipeline: Pipeline, batches: Iterable[Batch | tuple[Tensor, Tensor]], weights: Sequence[float] | None = None
) -> float:
    """Return the mean of the pipeline's loss over batches, without gradients; the same on every rank.

    `weights` are what each loss is the mean of; by default they are equal.
    """
    total = 0.0
    if not weights:
        batches = list(batches)
        weights = [1.0] * len(batches)
    for each, weight in zip(batches, weights, strict=True):
        batch = as_part(each)
        result = pipeline.evaluate(*batch.args, target=batch.target, **batch.kwargs)
        assert result.loss is not None, "the pipeline has a loss and got a target"
        total += result.loss.item() * weight
    return total / sum(weights)
