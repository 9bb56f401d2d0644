"""The loss on text that the model was not trained on."""

from collections.abc import Sequence

from torch import Tensor

from penstock.execute.batch.stream import as_part
from penstock.pipeline import Pipeline
from penstock.train.batches import Batch, on_device


def mean_loss(pipeline: Pipeline, batches: Sequence[Batch | tuple[Tensor, Tensor]]) -> float:
    """Return the mean of the pipeline's loss over batches of equal size, without gradients; the same on every rank."""
    total = 0.0
    for each in batches:
        batch = on_device(as_part(each), pipeline.device)
        result = pipeline.evaluate(*batch.args, target=batch.target, **batch.kwargs)
        assert result.loss is not None, "the pipeline has a loss and got a target"
        total += result.loss.item()
    return total / len(batches)
