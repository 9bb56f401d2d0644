"""Losses that layers of any stage add by themselves: their gradient begins in the backward of that stage.

A stage's auxiliary losses are one more output of its graph, beside those that the next stage gets; nobody sends their
gradient, it is there from the start. So every schedule and both ways of running a backward treat them rightly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.execute.batch.step import Place, Step
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.methods import has_methods
from penstock.execute.stages.carried import RunForward, Save
from penstock.execute.stages.stage import SavedForward, Stage


class Auxiliary(Protocol):
    """A module of a layer to which the layer adds losses, such as `penstock.models.AuxiliaryLoss`."""

    name: str
    weight: float

    def begin(self) -> None:
        """Forget everything, and count what is added until `take`."""
        ...

    def take(self) -> Tensor | None:
        """Return what was added, 0-dim, and forget it; what is added later, by recomputations, does not count."""
        ...

    def end(self) -> None:
        """Forget everything, and be as if nobody had called `begin`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AddedLosses:
    """What the layers of a stage added in one forward."""

    values: Mapping[LossName, Tensor]
    """0-dim, detached, before their weights; added up in float64, so that the split into stages matters little."""
    total: Tensor | None
    """0-dim, with its graph: the sum of weight x value; None where nothing was added."""


def auxiliary_modules(layers: Sequence[nn.Module]) -> list[Auxiliary]:
    """Return the modules of some layers that losses are added to, each once."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [cast(Auxiliary, module) for module in modules if has_methods(module, Auxiliary)]


def auxiliary_of(stages: Sequence[Stage]) -> dict[int, list[Auxiliary]]:
    """Return, per stage index, the modules that its layers add losses to, and let the stages know."""
    found = {stage.index: auxiliary_modules([*stage.layers.values()]) for stage in stages}
    for stage in stages:
        stage.adds_losses = bool(found[stage.index])
    return found


def take_all(modules: Sequence[Auxiliary]) -> AddedLosses:
    """Take what was added since the modules' `begin`."""
    values: dict[LossName, Tensor] = {}
    total: Tensor | None = None
    for module in modules:
        if (value := module.take()) is None:
            continue
        name, exact = LossName(module.name, True, value.dtype), value.detach().to(torch.float64)
        values[name] = values[name] + exact if name in values else exact
        weighted = value * module.weight
        total = weighted if total is None else total + weighted
    return AddedLosses(values, total)


@dataclass(frozen=True, slots=True, eq=False)
class StageWithLosses:
    """A stage at work on one microbatch (or slice) whose layers add losses."""

    stage: Stage
    modules: Sequence[Auxiliary]
    place: Place
    step: Callable[[], Step]
    """The step that runs."""

    def running(self, run: RunForward) -> RunForward:
        """Return a forward that also notes what was added, and where its backward is to begin."""

        def run_all(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
            for module in self.modules:
                module.begin()
            try:
                outputs = run(inputs, keywords)
            finally:
                added = take_all(self.modules)
            self._note(added)
            return outputs

        return run_all

    def saving(self, save: Save) -> Save:
        """Return a `save` that keeps the beginning of that backward; it is called after the forward."""

        def save_all(inputs: Any, outputs: Any) -> SavedForward:
            saved = save(inputs, outputs)
            root = self.step().roots.pop(self._key, None)
            if root is not None:
                saved.edges.append(get_gradient_edge(root))
                saved.loss_gradients.append(torch.ones_like(root))
            return saved

        return save_all

    @property
    def _key(self) -> tuple[int, Place]:
        return self.stage.index, self.place

    def _note(self, added: AddedLosses) -> None:
        step = self.step()
        if added.total is None:
            return
        for name, value in added.values.items():
            step.note(name, self.place, value)
        step.note(LossName(ALL_TOGETHER, True, added.total.dtype), self.place, added.total.detach())
        if added.total.requires_grad:
            root = step.root_of(added.total, step.auxiliary_shares.factor(*self.place))
            if root is not None:
                step.roots[self._key] = root
