"""`Update`: makes new weights of the gradients of a step, or skips it, alike on all ranks."""

import math
from collections.abc import Collection
from typing import Any

from torch.optim import Optimizer

from penstock.pipeline import Pipeline
from penstock.train.optimizing.main_weights import MainWeightOptimizer
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.optimizing.precision import LossScaler, Precision
from penstock.train.settings.sections import OptimizerSection


class Update:
    """The optimizer of one rank with its loss scale; every rank calls it alike.

    A step is `measure`, then `apply` or `skip`. With a loss scale, the pipeline's `scale_loss` is `scale_mean` of
    a `LossScaler`.
    """

    optimizer: Optimizer
    """The optimizer of the pipeline's parameters; its `state_dict()` includes main weights."""

    def __init__(
        self, pipeline: Pipeline, options: OptimizerSection, precision: Precision, embeddings: Collection[str] = ()
    ) -> None:
        self.optimizer = build_optimizer(
            pipeline.named_parameters(),
            options,
            has_main_weights=precision.has_main_weights,
            embeddings=embeddings,
            device=pipeline.device,
        )
        self.num_skipped = 0
        """Steps that changed no weight, because a number was not finite."""
        self.num_skipped_in_a_row = 0
        self._pipeline = pipeline
        self._clip_norm = options.clip_norm or math.inf
        owner = getattr(pipeline.options.scale_loss, "__self__", None)
        self._losses = owner if isinstance(owner, LossScaler) else None
        self._scaler = owner if isinstance(owner, LossScaler) and owner.is_enabled() else None

    @property
    def loss_scale(self) -> float | None:
        """The factor of losses against underflow; None where they have none."""
        return None if self._scaler is None else self._scaler.get_scale()

    def begin_batch(self, share: float) -> None:
        """Say which share the batch that follows has in the loss of its step; the shares of a step add up to 1."""
        if self._losses is not None:
            self._losses.share = share

    def measure(self) -> float:
        """Return the norm of the gradients of all ranks, which are clipped by it; a collective.

        It is not finite on any rank if a gradient of any rank is not.
        """
        if isinstance(self.optimizer, MainWeightOptimizer):
            self.optimizer.take_gradients()
        if self._scaler is not None and self._has_gradients:
            self._scaler.unscale_(self._stepped)
        return self._pipeline.clip_grad_norm_(self._clip_norm).item()

    def apply(self, learning_rate: float) -> None:
        """Step the optimizer, and forget the gradients."""
        for group in (*self.optimizer.param_groups, *self._stepped.param_groups):
            group["lr"] = learning_rate
        if self._scaler is None:
            self._stepped.step()
        elif self._has_gradients:
            self._scaler.step(self._stepped)
        self._finish()
        self.num_skipped_in_a_row = 0

    def skip(self, *, is_overflow: bool) -> None:
        """Change no weight, and forget the gradients; count it if a number was not finite."""
        self._finish()
        self.num_skipped += is_overflow
        self.num_skipped_in_a_row += is_overflow

    def state(self) -> dict[str, Any]:
        """Return the state beside tensors, numbers and texts for JSON; it is the same on every rank."""
        return {
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; where the precision is another one, the loss scale begins anew."""
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
        if self._scaler is not None and state["loss_scaler"] is not None:
            self._scaler.load_state_dict(state["loss_scaler"])

    def _finish(self) -> None:
        if self._scaler is not None:
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _stepped(self) -> Optimizer:
        """The optimizer whose parameters have the gradients: that of the main weights, where there are any."""
        return self.optimizer.inner if isinstance(self.optimizer, MainWeightOptimizer) else self.optimizer

    @property
    def _has_gradients(self) -> bool:
        return any(param.grad is not None for group in self._stepped.param_groups for param in group["params"])
