"""A custom function of activations and weights that asks which half is wanted (wanted.py): its backward runs twice.

I   backward(ctx, dy) -> dx, None           the gradients dy and what ctx holds are kept
W   backward(stand-in for ctx, dy) -> None, dw
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import PipelineError, warn
from penstock.execute.split.deferred import Deferred, Rung, fitted
from penstock.execute.split.wanted import Part, want
from penstock.execute.undocumented import (
    arguments_of,
    backward_of,
    function_of,
    run_instead,
    version_of,
)

_WARNED = "_penstock_warned"


@dataclass(slots=True, eq=False)
class CustomFunction:
    """A call of a function whose backward asks."""

    node: Any
    places: Sequence[int]
    is_hooked: bool = False
    num_multiplications: float = float("inf")
    rung: Rung = Rung.FUNCTION
    parameters: Sequence[Tensor] = ()
    roots: Sequence[GradientEdge] = ()
    function: Any = None
    arguments: Sequence[int] = ()
    """Which arguments of the forward the weights are."""
    arrived: Sequence[Tensor | None] = ()
    """Those of the outputs, between I and W."""
    saved: Sequence[Tensor | None] = ()
    versions: Sequence[int] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    """What the forward has set on the ctx."""
    num_arguments: int = 0

    def __post_init__(self) -> None:
        self.num_arguments = len(self.node.needs_input_grad)
        following = self.node.next_functions
        self.roots = [GradientEdge(*following[place]) for place in self.places]
        self.function = function_of(self.node)
        self.arguments = arguments_of(self.node, self.places)

    @property
    def kept(self) -> list[Tensor]:
        """The gradients of the outputs, and what the ctx holds."""
        held = _tensors_in([self.arrived, self.saved, self.attributes])
        return [each for each in held if not isinstance(each, nn.Parameter)]

    def end(self) -> None:
        """Return None: a function that leads to weights alone is a branch."""

    def handover(self) -> None:
        """Return None, likewise."""

    def watch(self, found: list[Deferred]) -> None:
        """Have I call the backward for the inputs alone."""
        node = self.node

        def run_input(*gradients: Tensor | None) -> Any:
            self.take(gradients)
            found.append(self)
            want(node, Part.INPUT)
            results = run(*gradients)
            self._warn_of_unwanted(_listed(results), self.arguments, Part.INPUT)
            return results  # autograd uses what I asks for

        run = run_instead(node, run_input)

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients and what the ctx holds; detached, since an output that is saved leads to the node."""
        self.arrived = gradients
        self.saved = list(map(_detached, self.node.saved_tensors))
        self.versions = [0 if each is None else version_of(each) for each in self.saved]
        self.attributes = {name: value for name, value in vars(self.node).items() if name != "apply"}

    def release(self) -> None:
        """Forget the node."""
        run_instead(self.node, None)
        self.node = None

    def gradients(self) -> Sequence[Tensor | None]:
        """Call the backward for the weights alone.

        Raises:
            PipelineError: a saved tensor was changed in place since I ran, or there are too few gradients.
        """
        for tensor, version in zip(self.saved, self.versions, strict=True):
            if tensor is not None and version_of(tensor) != version:
                raise PipelineError(
                    f"{self.function.__name__}: a tensor of shape {tuple(tensor.shape)} that it saved was changed in "
                    f"place between I and W of a split backward: it is at version {version_of(tensor)}, expected "
                    f"{version}. Save a copy (clone()), or run a schedule with whole backwards"
                )
        ctx = SimpleNamespace(**self.attributes)
        ctx.saved_tensors = tuple(self.saved)
        ctx.needs_input_grad = tuple(number in self.arguments for number in range(self.num_arguments))
        want(ctx, Part.WEIGHT)
        results = _listed(backward_of(self.function)(ctx, *self.arrived))
        self.arrived, self.saved, self.attributes = (), (), {}
        if len(results) <= max(self.arguments):
            raise PipelineError(
                f"{self.function.__name__}.backward: in the `W` of a split backward it returned {len(results)} "
                f"gradients, expected {self.num_arguments}, one for each argument of the forward; return None for "
                "those that are not wanted"
            )
        others = [number for number in range(len(results)) if number not in self.arguments]
        self._warn_of_unwanted(results, others, Part.WEIGHT)
        return [fitted(results[argument], root) for argument, root in zip(self.arguments, self.roots, strict=True)]

    def _warn_of_unwanted(self, results: Sequence[Any], arguments: Sequence[int], part: Part) -> None:
        """Say once per function and argument that a gradient of these was not wanted; it is dropped."""
        for argument in arguments:
            if argument < len(results) and results[argument] is not None:
                _warn_of(self.function, argument, part)


def _warn_of(function: Any, argument: int, part: Part) -> None:
    if _WARNED not in vars(function):
        setattr(function, _WARNED, set())
    warned = vars(function)[_WARNED]
    if (argument, part) in warned:
        return
    warned.add((argument, part))
    question = "wants_weight_gradient" if part is Part.INPUT else "wants_input_gradient"
    warn(
        f"{function.__name__}.backward: in the `{part.value}` of a split backward it returned a gradient for "
        f"{_name_of(function, argument)}, which was not wanted there. It is dropped; the gradients are right, but this "
        f"one was computed twice. Expected None where ps.{question}(ctx) is False"
    )


def _name_of(function: Any, argument: int) -> str:
    """Name an argument of the forward, which begins with ctx unless the function has a `setup_context`."""
    names = list(inspect.signature(function.forward).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]
    is_named = argument < len(names) and names[argument].kind is not inspect.Parameter.VAR_POSITIONAL
    return f"its argument `{names[argument].name}`" if is_named else f"its argument number {argument + 1}"


def _detached(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or isinstance(tensor, nn.Parameter) else tensor.detach()


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
