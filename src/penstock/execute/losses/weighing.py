"""`LossMaker`: weighs each batch, with replicas as a share of the job, and makes the losses of its step."""

from penstock.execute.batch.admission import Batch
from penstock.execute.control.agreement import AgreedStep, BatchWeight
from penstock.execute.losses.loss import Loss, LossWeights, Measured, Scale
from penstock.execute.losses.output import takes_weight
from penstock.execute.losses.step_losses import NO_SHARES, StepLosses


class LossMaker:
    """The rules of one rank for its losses; `is_last`: whether it holds a last stage, and so computes some."""

    def __init__(self, loss: Loss | None, weights: LossWeights, scale: Scale | None, *, is_last: bool) -> None:
        self._loss = loss
        self._weights = weights
        self._scale = scale
        self._is_last = is_last
        self._takes_weight = loss is not None and takes_weight(loss)
        self._measured: tuple[Measured, Measured] | None = None
        """Of the batch that was weighed last, by rows and by what its losses are weighed by."""

    def weigh(self, batch: Batch, agreed: AgreedStep) -> BatchWeight:
        """Return what a batch weighs against those of the other replicas. Raises: PipelineError, as `count` does."""
        rows = self._weights.of_rows.measure(batch.microbatches, batch.slices)
        is_counting = self._is_last and self._loss is not None and (batch.has_target or agreed.is_training)
        own = self._weights.measure(batch.microbatches, batch.slices) if is_counting else rows
        self._measured = rows, own
        return BatchWeight(sum(rows.wholes), sum(own.wholes), len(rows.wholes))

    def of(self, batch: Batch, agreed: AgreedStep) -> StepLosses:
        """Return the losses of a step, which are still to be computed. Raises: PipelineError, as `count` does."""
        loss = self._loss if agreed.is_training or batch.has_target else None
        weights, job = self._weights, agreed.weight
        shares, has_shares = NO_SHARES, self._is_last and loss is not None
        if job is None or self._measured is None:
            rows = weights.of_rows.shares(batch.microbatches, batch.slices)
            if has_shares:  # the others may have no target to count
                shares = weights.shares(batch.microbatches, batch.slices)
        else:
            by_rows, own = self._measured
            rows = weights.of_rows.shares_of(by_rows, (job.rows, job.num_microbatches))
            if has_shares:
                shares = weights.shares_of(own, (job.count, job.num_microbatches))
            self._measured = None
        return StepLosses(
            len(batch.slices),
            len(batch.slices[0]),
            loss,
            shares,
            rows,
            takes_weight=self._takes_weight,
            scale=self._scale,
        )
