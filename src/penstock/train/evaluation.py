"""The loss on text that the model was not trained on."""

from collections.abc import Sequence

from penstock.pipeline import Pipeline
from penstock.train.data import Batch


def mean_loss(pipeline: Pipeline, batches: Sequence[Batch]) -> float:
    """Return the mean of the pipeline's loss over batches of equal size, without gradients; the same on every rank."""
    total = 0.0
    for tokens, target in batches:
        result = pipeline.evaluate(tokens.to(pipeline.device), target=target.to(pipeline.device))
        assert result.loss is not None, "the pipeline has a loss and got a target"
        total += result.loss.item()
    return total / len(batches)
