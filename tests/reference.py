"""Plain gradient accumulation on one process: the judge that every schedule is compared with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import BatchSpec, Microbatch
from penstock.execute.losses.loss import Count, Loss, LossShares, LossWeights, combine_losses
from penstock.execute.losses.output import LossParts, read_loss, takes_weight
from penstock.execute.stages.auxiliary import AddedLosses, Auxiliary, auxiliary_modules, take_all
from penstock.execute.stages.feature import BeforeLayer
from penstock.execute.stages.keywords import run_layers
from penstock.execute.stages.randomness import LOSS, SeededRandomness
from penstock.execute.stages.skips import SkipPart, StageSkips
from penstock.execute.values.tree import detached


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`loss` of the batch; `losses` and `outputs` per microbatch. No tensor keeps its graph. The rest is as in
    `StepResult`."""

    loss: Tensor
    losses: list[Tensor]
    outputs: list[Any]
    named_losses: dict[str, Tensor]
    reported: list[Any]
    total: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """What one microbatch came to."""

    output: Any
    parts: LossParts
    added: AddedLosses


class _Weighed:
    """The losses of a batch, weighted as a pipeline weighs them."""

    def __init__(self, weights: LossWeights, microbatches: Sequence[Microbatch]) -> None:
        wholes = [[microbatch] for microbatch in microbatches]
        self.shares = weights.shares(microbatches, wholes)
        self.rows = weights.shares_of_rows(microbatches, wholes)

    def root(self, done: _Forward, microbatch: int) -> Tensor | None:
        """Return the part of a microbatch in what is trained; None where it has none."""
        terms = []
        if weight := self.shares.weights[microbatch]:
            terms.append(done.parts.loss * weight)
        if done.added.total is not None and done.added.total.requires_grad and self.rows.weights[microbatch]:
            terms.append(done.added.total * self.rows.weights[microbatch])
        return sum(terms[1:], start=terms[0]) if terms else None

    def result(self, done: Sequence[_Forward]) -> ReferenceResult:
        """Put the microbatches together."""
        losses = [each.parts.loss.detach() for each in done]
        loss = combine_losses(losses, self.shares.weights)
        totals = {index: each.added.total for index, each in enumerate(done) if each.added.total is not None}
        reported = [each.parts.reported for each in done]
        return ReferenceResult(
            loss,
            losses,
            [detached(each.output) for each in done],
            self._named(done),
            [] if all(value is None for value in reported) else reported,
            loss + _combined(totals, self.rows) if totals else loss,
        )

    def _named(self, done: Sequence[_Forward]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for each in done for name in each.parts.named):
            named = {index: each.parts.named[name] for index, each in enumerate(done) if name in each.parts.named}
            found[name] = _combined(named, self.shares)
        for key in dict.fromkeys(key for each in done for key in each.added.values):
            values = {index: each.added.values[key] for index, each in enumerate(done) if key in each.added.values}
            exact = _combined({index: value.to(key.dtype) for index, value in values.items()}, self.rows)
            found[key.name] = found[key.name] + exact if key.name in found else exact
        return found


def reference_step(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss,
    num_microbatches: int,
    reduction: str = "mean",
    count: Count | None = None,
    allow_ragged: bool = False,
    specs: BatchSpec | None = None,
    seed: int | None = None,
    step_number: int = 0,
) -> ReferenceResult:
    """Run forward, loss and backward of one microbatch after another; gradients are added to `.grad`.

    A microbatch of weight 0 runs no backward unless layers add losses: it has nothing to add. With a `seed`, layers
    draw what they draw in the step of this number of a pipeline with this seed.
    """
    rule = BatchRule(num_microbatches, specs=specs, allow_ragged=allow_ragged)
    microbatches = rule.microbatches(args, kwargs, target)
    weighed = _Weighed(LossWeights(reduction, count), microbatches)
    model = _Model(modules, loss, weighed.shares)
    randomness = None if seed is None else SeededRandomness(seed, _device_of(modules))
    done = []
    for microbatch in microbatches:
        with _drawing(randomness, microbatch.index, step_number) as before_layer:
            forward, skips = model.forward(microbatch, before_layer)
        root = weighed.root(forward, microbatch.index)
        if root is not None:
            with skips.around_backward():  # layers may compute their forward again
                torch.autograd.backward(root)
        done.append(_without_graph(forward))
    model.end()
    return weighed.result(done)


@torch.no_grad()
def reference_evaluate(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss,
    num_microbatches: int,
    reduction: str = "mean",
    count: Count | None = None,
    allow_ragged: bool = False,
    specs: BatchSpec | None = None,
) -> ReferenceResult:
    """Run forward and loss only; modules stay in the mode (train or eval) in which they are."""
    rule = BatchRule(num_microbatches, specs=specs, allow_ragged=allow_ragged)
    microbatches = rule.microbatches(args, kwargs, target)
    weighed = _Weighed(LossWeights(reduction, count), microbatches)
    model = _Model(modules, loss, weighed.shares)
    done = [model.forward(microbatch)[0] for microbatch in microbatches]
    model.end()
    return weighed.result(done)


class _Model:
    """The layers of a whole model with their loss, run one microbatch after another."""

    def __init__(self, modules: Sequence[nn.Module], loss: Loss, shares: LossShares) -> None:
        self._skips = StageSkips(modules)
        self._modules = modules
        self._auxiliary: Sequence[Auxiliary] = auxiliary_modules(modules)
        self._loss = loss
        self._shares = shares
        self._tells_weight = takes_weight(loss)

    def forward(self, microbatch: Microbatch, before_layer: BeforeLayer | None = None) -> tuple[_Forward, SkipPart]:
        """Run the layers and the loss; return also the skips, for the backward."""
        for module in self._auxiliary:
            module.begin()
        skips = SkipPart(self._skips)
        with skips.around_forward():
            output = run_layers(self._modules, microbatch.args, microbatch.kwargs, before_layer)
        skips.buffer.close()
        added = take_all(self._auxiliary)
        if before_layer is not None:
            before_layer(LOSS)
        known = {"weight": self._shares.factor(microbatch.index, 0)} if self._tells_weight else {}
        value = self._loss(output, microbatch.target, **known)
        parts = read_loss(value, microbatch.index, self._shares.count(microbatch.index, 0))
        return _Forward(output, parts, added), skips

    def end(self) -> None:
        """Leave the layers as they were."""
        for module in self._auxiliary:
            module.end()


def _without_graph(done: _Forward) -> _Forward:
    parts, added = done.parts, done.added
    total = None if added.total is None else added.total.detach()
    return _Forward(
        detached(done.output),
        LossParts(parts.loss.detach(), parts.named, parts.reported),
        AddedLosses(added.values, total),
    )


def _combined(losses: Mapping[int, Tensor], shares: LossShares) -> Tensor:
    """Return the loss of the batch; a microbatch that has none adds nothing."""
    return combine_losses([*losses.values()], [shares.weights[index] for index in losses])


@contextmanager
def _drawing(randomness: SeededRandomness | None, microbatch: int, step_number: int) -> Iterator[BeforeLayer | None]:
    if randomness is None:
        yield None
        return
    with randomness.drawing(step_number, (microbatch, 0)) as before_layer:
        yield before_layer


def _device_of(modules: Sequence[nn.Module]) -> torch.device:
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
