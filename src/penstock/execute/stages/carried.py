"""What the layers of a stage carry from slice to slice of a microbatch, and the gradients that come back for it.

    forward    slice 0 --left--> slice 1 --left--> slice 2
    backward   slice 0 <--grad-- slice 1 <--grad-- slice 2

What a slice takes are further inputs of its graph, detached leaves as those from another stage; what it leaves are
further outputs. A schedule runs the backward of a slice after those of all later ones, so by then their gradients are
there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import ConfigError
from penstock.execute.batch.step import Place
from penstock.execute.methods import has_methods
from penstock.execute.stages.stage import SavedForward, Stage
from penstock.execute.values.tree import as_graph_leaves, needing_gradient

RunForward = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
Save = Callable[[Any, Any], SavedForward]
RunBackward = Callable[[Stage, SavedForward, Sequence[Tensor]], list[Tensor]]
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Carrying(Protocol):
    """A module of a layer that holds what goes from slice to slice, such as `penstock.models.Carry`."""

    def begin_slice(self, before: Any, *, keeps: bool) -> None:
        """Begin a forward after slices that left `before`, None at first; or its recomputation, which keeps nothing."""
        ...

    def end_slice(self) -> Any:
        """End what was begun, even if it failed, and return what is left for later slices; None leaves nothing new."""
        ...


@dataclass(slots=True, eq=False)
class _Left:
    """What a slice left in one module."""

    value: Any
    """Detached; None as soon as no later slice can take it."""
    edges: list[GradientEdge]
    """Where the gradients of its tensors that need one enter the slice's graph."""
    gradients: list[Tensor] = field(default_factory=list)
    """One per edge: the sum over the later slices whose backward has run; empty before the first."""

    @classmethod
    def of(cls, value: Any) -> "_Left":
        return cls(as_graph_leaves(value), [get_gradient_edge(tensor) for tensor in needing_gradient(value)])

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        if self.gradients:
            gradients = [total + gradient for total, gradient in zip(self.gradients, gradients, strict=True)]
        self.gradients = list(gradients)


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """What a slice took of what earlier ones had left in one module."""

    source: _Left
    value: Any
    leaves: list[Tensor]
    """Of the value, the tensors that need a gradient."""

    @classmethod
    def of(cls, source: _Left) -> "_Taken":
        return cls(source, source.value, needing_gradient(source.value))


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """What one slice took and left, per module; kept for its backward."""

    taken: Sequence[_Taken | None]
    left: Sequence[_Left | None]

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for taken in self.taken if taken is not None for leaf in taken.leaves]


@dataclass(slots=True, eq=False)
class Trail:
    """What the slices of one microbatch have left on one stage so far."""

    latest: list[_Left | None]
    """Per module."""
    passed: dict[int, _Passed] = field(default_factory=dict)
    """Per slice whose backward is still to come."""
    has_ended: bool = False
    """Whether the last slice has been forward."""

    @property
    def is_done(self) -> bool:
        return self.has_ended and not self.passed

    def replace(self, left: Sequence[_Left | None], *, is_last: bool) -> None:
        """Put what a slice has left in the place of what was there, of which only the gradients are still needed."""
        for index, (new, old) in enumerate(zip(left, self.latest, strict=True)):
            if old is not None and (is_last or new is not None):
                old.value = None
            self.latest[index] = None if is_last else new or old
        self.has_ended = is_last


Trails = dict[tuple[int, int], Trail]
"""Per stage and microbatch; each from the forward of its first slice to the last use of what was left."""


def carrying_modules(stage: Stage) -> list[Carrying]:
    """Return the modules of a stage that carry something, each once."""
    modules = [module for layer in stage.layers.values() for module in layer.modules()]
    return [cast(Carrying, module) for module in dict.fromkeys(modules) if has_methods(module, Carrying)]


@dataclass(frozen=True, slots=True, eq=False)
class StageOnSlice:
    """A stage at work on one slice: its layers find what earlier slices left, and gradients for that go back."""

    stage: Stage
    modules: Sequence[Carrying]
    trails: Trails
    place: Place
    is_last: bool
    """Whether no slice comes after this one."""

    def forward(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the stage's forward."""
        trail = self.trails.setdefault(self._key, Trail([None] * len(self.modules)))
        taken = [None if left is None else _Taken.of(left) for left in trail.latest]
        self._begin(taken, keeps=not self.is_last)
        try:
            outputs = self.stage.forward(inputs, keywords)
        finally:
            found = self._end()
        left = [None if value is None else _Left.of(value) for value in found]
        if torch.is_grad_enabled():
            trail.passed[self.place[1]] = _Passed(taken, left)
        trail.replace(left, is_last=self.is_last)
        self._drop_if_done()
        return outputs

    def again(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the forward of a slice once more, on what it took at first; gradients enter the new graph."""
        passed = self._trail.passed[self.place[1]]
        self._begin(passed.taken, keeps=not self.is_last)
        try:
            outputs = self.stage.forward(inputs, keywords)
        finally:
            found = self._end()
        for left, value in zip(passed.left, found, strict=True):
            if left is not None:
                left.edges = _Left.of(value).edges
        return outputs

    def saving(self, save: Save) -> Save:
        """Return a `save` that also keeps as inputs what this slice took; it is called after `forward`."""

        def save_all(inputs: Any, outputs: Any) -> SavedForward:
            saved = save(inputs, outputs)
            saved.inputs.extend(self._trail.passed[self.place[1]].leaves)
            return saved

        return save_all

    def backing(self, run: RunBackward) -> RunBackward:
        """Return a backward that also starts at what this slice left, and hands back gradients of what it took."""

        def run_all(stage: Stage, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
            passed = self._trail.passed.pop(self.place[1])
            extra = [left for left in passed.left if left is not None and left.gradients]
            saved.edges.extend(edge for left in extra for edge in left.edges)
            gradients = [*gradients, *(gradient for left in extra for gradient in left.gradients)]
            self._begin(passed.taken, keeps=False)  # layers may compute their forward again
            try:
                results = run(stage, saved, gradients)
            finally:
                self._end()
            num_own = len(results) - len(passed.leaves)
            _hand_back(passed, results[num_own:])
            self._drop_if_done()
            return results[:num_own]

        return run_all

    @property
    def _key(self) -> tuple[int, int]:
        return self.stage.index, self.place[0]

    @property
    def _trail(self) -> Trail:
        return self.trails[self._key]

    def _begin(self, taken: Sequence[_Taken | None], *, keeps: bool) -> None:
        for module, each in zip(self.modules, taken, strict=True):
            module.begin_slice(None if each is None else each.value, keeps=keeps)

    def _end(self) -> list[Any]:
        return [module.end_slice() for module in self.modules]

    def _drop_if_done(self) -> None:
        if self._trail.is_done:
            del self.trails[self._key]


def _hand_back(passed: _Passed, gradients: Sequence[Tensor]) -> None:
    """Give the gradients of what a slice took to those that left it."""
    first = 0
    for taken in passed.taken:
        if taken is not None:
            taken.source.add_gradients(gradients[first : first + len(taken.leaves)])
            first += len(taken.leaves)


def refuse_layers_that_look_back(stages: Sequence[Stage], kinds: tuple[type[nn.Module], ...]) -> None:
    """Refuse modules that need what earlier slices left behind and do not carry it.

    Who calls such a module may carry for it: the module that holds both it and what carries.

    Raises:
        ConfigError: naming a layer.
    """
    layers = [(name, layer) for stage in stages for name, layer in stage.layers.items()]
    found = [f"{name!r} ({type(each).__name__})" for name, layer in layers for each in _looking_back(layer, kinds)]
    if found:
        raise ConfigError(
            f"the schedule cuts sequences into slices, but layer {found[0]} looks back over the sequence and carries "
            "nothing from slice to slice, so its gradients would be wrong; hold it in a module that keeps its keys and "
            "values, or its state, in a penstock.models.Carry, or use a schedule with 1 slice",
            key="schedule",
        )


def _looking_back(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], *, is_carried: bool = False
) -> Iterator[nn.Module]:
    """The modules of these kinds for which neither they nor who calls them carry anything."""
    is_carrying = any(has_methods(child, Carrying) for child in module.children())
    if isinstance(module, kinds) and not (is_carrying or is_carried):
        yield module
    # a list does not call what it holds
    reaches = is_carrying or (is_carried and isinstance(module, _LISTS))
    for child in module.children():
        yield from _looking_back(child, kinds, is_carried=reaches)
