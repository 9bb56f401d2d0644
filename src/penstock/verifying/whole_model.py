"""The unsplit model at work: plain autograd in one process, one microbatch after another as a pipeline adds them up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import Microbatch, merge_outputs
from penstock.execute.batch.stream import Part
from penstock.execute.losses.ignored import counted_targets
from penstock.execute.losses.loss import Count, Loss, LossShares, LossWeights, combine_losses
from penstock.execute.losses.output import read_loss, takes_weight
from penstock.execute.stages.auxiliary import Auxiliary, take_all
from penstock.execute.stages.feature import modules_with
from penstock.execute.values.tree import detached
from penstock.verifying.observation import (
    BUFFER,
    EVALUATION,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    START,
    TRAINING,
    Observation,
    kept,
    named_losses,
    named_outputs,
    shrink,
)


@dataclass(frozen=True, slots=True)
class Objective:
    """What both sides train on: a loss, what it counts, and how many microbatches a batch has."""

    loss: Loss
    count: Count | None
    num_microbatches: int
    is_transformers: bool = False
    """Whether the model returns an output of transformers, of which a pipeline has the logits."""


class WholeModel:
    """A copy of the unsplit model; it changes as its batches run."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model, self._objective = model, objective
        self._rule = BatchRule(objective.num_microbatches, allow_ragged=True)
        self._auxiliary: list[Auxiliary] = modules_with([model], Auxiliary)
        self._saved_names = set(model.state_dict())

    def run(self, batches: Sequence[Part], modes: Sequence[str]) -> list[Observation]:
        """Run all batches in these modes, and return what was there before and after each."""
        # Buffers that are not saved may have a copy on each rank, so nobody need hold them.
        saved_buffers = {name: buffer for name, buffer in self._buffers().items() if name in self._saved_names}
        start = {PARAMETER: kept(dict(self.model.named_parameters())), BUFFER: saved_buffers}
        observations = [Observation(START, 0, start)]
        for number, batch in enumerate(batches):
            microbatches = self._rule.microbatches(batch.args, batch.kwargs, batch.target)
            run_by_mode: dict[str, Callable[[Sequence[Microbatch]], Any]] = {
                EVALUATION: self._evaluate,
                TRAINING: self._train,
            }
            for mode in modes:
                observations.append(Observation(mode, number, run_by_mode[mode](microbatches)))
            shrink(list(self.model.parameters()))
        return observations

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> dict[str, dict[str, Tensor | None]]:
        training_by_module = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                return self._forwards(microbatches)
        finally:
            for module, is_training in training_by_module.items():
                module.training = is_training

    def _train(self, microbatches: Sequence[Microbatch]) -> dict[str, dict[str, Tensor | None]]:
        self.model.zero_grad()
        tensors = self._forwards(microbatches, backward=True)
        gradients = {name: item.grad for name, item in self.model.named_parameters()}
        return {**tensors, GRADIENT: kept(gradients), BUFFER: self._buffers()}

    def _forwards(
        self, microbatches: Sequence[Microbatch], *, backward: bool = False
    ) -> dict[str, dict[str, Tensor | None]]:
        loss_function, count = self._objective.loss, self._objective.count
        weights = LossWeights("mean", count, counted_targets(loss_function))
        shares = weights.shares_of(weights.measure(microbatches, [[microbatch] for microbatch in microbatches]))
        rows = weights.of_rows
        row_shares = rows.shares_of(rows.measure(microbatches, [[microbatch] for microbatch in microbatches]))
        outputs, losses = [], []
        for index, microbatch in enumerate(microbatches):
            output, added = self._forward(microbatch)
            options = {"weight": shares.factor(index, 0)} if takes_weight(loss_function) else {}
            parts = read_loss(loss_function(output, microbatch.target, **options), index, shares.count(index, 0))
            if backward:
                total = _trained(parts.loss, parts.named_losses, shares, index)
                if added is not None and added.requires_grad:
                    total = total + added * row_shares.factor(index, 0)
                if total.requires_grad:
                    total.backward()  # type: ignore[no-untyped-call]
            outputs.append(detached(output))
            losses.append(parts.loss.detach())
        batch_loss = combine_losses(losses, shares.weights)
        return {OUTPUT: named_outputs(merge_outputs(outputs)), LOSS: named_losses(batch_loss, losses)}

    def _forward(self, microbatch: Microbatch) -> tuple[Any, Tensor | None]:
        """Return the output of a microbatch, and what its layers add to the loss."""
        for module in self._auxiliary:
            module.begin()
        try:
            if not self._objective.is_transformers:
                output = self.model(*microbatch.args, **microbatch.kwargs)
                return output, take_all(self._auxiliary)[1]
            output = self.model(*microbatch.args, **microbatch.kwargs, use_cache=False, return_dict=True)
            balance = getattr(output, "aux_loss", None)
            added = None if balance is None else balance * self.model.config.router_aux_loss_coef  # type: ignore[union-attr]
            return output.logits, added
        finally:
            for module in self._auxiliary:
                module.end()

    @property
    def first_names(self) -> dict[str, str]:
        """The first name of each parameter, by each of its names."""
        name_by_id = {id(parameter): name for name, parameter in self.model.named_parameters()}
        named_parameters = self.model.named_parameters(remove_duplicate=False)
        return {name: name_by_id[id(parameter)] for name, parameter in named_parameters}

    def _buffers(self) -> dict[str, Tensor | None]:
        return kept(dict(self.model.named_buffers()))


def _trained(loss: Tensor, losses_by_name: Any, shares: LossShares, index: int) -> Tensor:
    """Return what a microbatch adds to the trained loss; one that counts nothing adds nothing, even if it is NaN."""
    factors = shares.named_factors(index, 0)
    terms = [losses_by_name[name] * factor for name, factor in factors.items() if factor]
    if not factors:
        factor = shares.factor(index, 0)
        terms = [loss * factor] if factor else []
    return sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(loss)
