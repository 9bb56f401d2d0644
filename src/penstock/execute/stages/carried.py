"""State that the layers of a stage carry from slice to slice of a microbatch, and the gradients that come back for it.

    forward    slice 0 --left--> slice 1 --left--> slice 2
    backward   slice 0 <--grad-- slice 1 <--grad-- slice 2

A slice takes further inputs of its graph, detached leaves as those from another stage, and leaves further outputs. A
schedule runs the backward of a slice after those of all later ones, so by then their gradients are
there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import ConfigError, PipelineError
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.stages.feature import Copied, ForwardPart, Roots, has_methods
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step
from penstock.execute.values.tree import as_graph_leaves, needing_gradient
from penstock.execute.values.version_guard import VersionGuard


class Carrying(Protocol):
    """A module of a layer that holds what goes from slice to slice, such as `ps.Carry`."""

    def begin_slice(self, before: Any, *, keeps: bool) -> None:
        """Begin a forward after slices that left `before`, None at first; or its recomputation, which keeps nothing."""

    def end_slice(self) -> Any:
        """End what was begun, even if it failed, and return what is left for later slices; None leaves nothing new."""


@dataclass(slots=True, eq=False)
class CarriedOut:
    """A value that a slice left in one module."""

    value: Any
    """The detached value; None as soon as no later slice can take it."""
    edges: list[GradientEdge]
    """The edges at which the gradients of its tensors enter the slice's graph."""
    gradients: list[Tensor] = field(default_factory=list)
    """One gradient per edge: the sum over the later slices whose backward has run; empty before the first."""

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients from one later slice."""
        if self.gradients:
            gradients = [total + gradient for total, gradient in zip(self.gradients, gradients, strict=True)]
        self.gradients = list(gradients)


Latest = list[CarriedOut | None]
"""The latest value of each module that a slice of one microbatch has left; `Step.carried` has them until the last slice
has run."""


def begin_slice(
    stage: int, modules: Sequence[Carrying], num_slices: int, copied: Copied | None, step: Step, place: MicrobatchKey
) -> "CarryPart":
    """Return what to do in the forward of one slice; `modules` are those of the stage that carry something.

    `copied`, if any, copies what would not live until later slices.
    """
    key = stage, place[0]
    latest: Latest = step.carried.setdefault(key, [None] * len(modules))
    is_last = place[1] == num_slices - 1
    if is_last:
        del step.carried[key]
    return CarryPart(modules, latest, copied, is_last=is_last)


class CarryPart(ForwardPart):
    """One slice at work: its layers find what earlier slices left, and gradients for that go back."""

    def __init__(self, modules: Sequence[Carrying], latest: Latest, copied: Copied | None, *, is_last: bool) -> None:
        self._modules = modules
        self._copied = copied
        self._latest = latest
        self._is_last = is_last
        self._runs_again = False
        self._sources = list(latest)
        """The value of an earlier slice that each module takes; None where it takes none."""
        self._values = [None if source is None else source.value for source in latest]
        self._leaves = list(map(needing_gradient, self._values))
        self._input_guard = VersionGuard.of(self._values)
        self._end_values: list[Any] = []
        self.carried_out: list[CarriedOut | None] = []
        """The value that this slice left for later ones in each module; None where it left nothing new."""

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        if self._runs_again and self._input_guard.is_changed:
            raise PipelineError(
                "a value that a layer carried from slice to slice was changed in place, so that its recomputation "
                "would begin with a later one. Let the layer make a new tensor, as in offset = offset + length, or "
                "take the stage out of the recomputation"
            )
        self._begin(keeps=not self._is_last)
        try:
            yield
        finally:
            self._end_values = self._end()

    def leave(self, outputs: Any) -> Any:
        """Put what this slice left in the place of what was there, of which only the gradients are still needed."""
        values, self._end_values = self._end_values, []
        if self._runs_again:
            for carried_out, value in zip(self.carried_out, values, strict=True):
                if carried_out is not None:  # the gradients of later slices enter the graph that was made now
                    carried_out.edges = _edges_of(value)
            return outputs
        values = values if self._copied is None else list(map(self._copied, values))
        self.carried_out = [
            None if value is None else CarriedOut(as_graph_leaves(value), _edges_of(value)) for value in values
        ]
        for index, (new, old) in enumerate(zip(self.carried_out, self._latest, strict=True)):
            # No later slice takes the old value now, and the slices that took it hold it themselves. From here on `old`
            # only collects the gradients that they send back.
            if old is not None and (self._is_last or new is not None):
                old.value = None
            self._latest[index] = None if self._is_last else new or old
        return outputs

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaves in self._leaves for leaf in leaves]

    def roots(self) -> Roots:
        roots = [out for out in self.carried_out if out is not None and out.gradients]
        return [edge for out in roots for edge in out.edges], [grad for out in roots for grad in out.gradients]

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        self._begin(keeps=False)
        try:
            yield
        finally:
            self._end()

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the values that this slice took to the slices that left them."""
        remaining = iter(gradients)
        for source, leaves in zip(self._sources, self._leaves, strict=True):
            if source is not None:
                source.add_gradients([next(remaining) for _ in leaves])

    def again(self) -> ForwardPart:
        """Return the part for the same slice: it takes what it took, and what it leaves is there already."""
        part = copy(self)
        part._runs_again = True
        # The second run has leaves of its own: its backward would call hooks that a layer has registered on the first
        # run's leaves.
        part._values = list(map(as_graph_leaves, self._values))
        part._leaves = list(map(needing_gradient, part._values))
        return part

    def _begin(self, *, keeps: bool) -> None:
        for module, value in zip(self._modules, self._values, strict=True):
            module.begin_slice(value, keeps=keeps)

    def _end(self) -> list[Any]:
        return [module.end_slice() for module in self._modules]


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def refuse_layers_that_look_back(stages: Sequence[Stage], kinds: tuple[type[nn.Module], ...]) -> None:
    """Refuse modules that need what earlier slices left behind and do not carry it.

    The parent of such a module may carry for it, if it holds both it and a module that carries.

    Raises:
        ConfigError: naming a layer.
    """
    layers = [(name, layer) for stage in stages for name, layer in stage.layers.items()]
    refused = [
        f"{name!r} ({type(module).__name__})" for name, layer in layers for module in _looking_back(layer, kinds)
    ]
    if refused:
        raise ConfigError(
            f"the schedule cuts sequences into slices, but layer {refused[0]} looks back over the sequence and carries "
            "nothing from slice to slice, so its gradients would be wrong; hold it in a module that keeps its keys and "
            "values, or its state, in a ps.Carry, or use a schedule with 1 slice",
            key="schedule",
        )


def _looking_back(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], *, is_carried: bool = False
) -> Iterator[nn.Module]:
    """Yield the modules of these kinds for which neither they nor who calls them carry anything."""
    is_carrying = any(has_methods(child, Carrying) for child in module.children())
    if isinstance(module, kinds) and not (is_carrying or is_carried):
        yield module
    # A list does not call the modules that it holds: whoever calls them may carry for them.
    reaches = is_carrying or (is_carried and isinstance(module, _LISTS))
    for child in module.children():
        yield from _looking_back(child, kinds, is_carried=reaches)


def _edges_of(tree: Any) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in needing_gradient(tree)]
