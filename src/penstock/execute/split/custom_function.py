"""A custom function of activations and weights that asks which half is wanted (wanted.py): its backward runs twice.

I   backward(ctx, dy) -> dx, None           the gradients dy and what ctx holds are kept
W   backward(stand-in for ctx, dy) -> None, dw
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError, warn
from penstock.execute.split.deferred_node import DeferredNode, detached, fitted
from penstock.execute.split.wanted import BackwardHalf, want
from penstock.execute.split.weight_graph import WeightGraph, open_places
from penstock.execute.undocumented import (
    arguments_of,
    backward_of,
    function_of,
    is_any_saved_elsewhere,
    run_instead,
    runs_once,
)

_WARNED = "_penstock_warned"


def find_custom_function(node: Any, graph: WeightGraph) -> "CustomFunction | None":
    """Find a call of a function that asks, of activations and weights; one of weights alone is a branch."""
    if not graph.runs_in_parts(node) or runs_once(function_of(node)) or is_any_saved_elsewhere(node):
        return None
    gradient_places = open_places(node)
    weight_places = [place for place in gradient_places if graph.origin_at(node, [place]) is not None]
    origin = graph.origin_at(node, weight_places) if len(weight_places) < len(gradient_places) else None
    return None if origin is None else CustomFunction(node, origin, weight_places, "custom function", math.inf)


@dataclass(slots=True, eq=False)
class CustomFunction(DeferredNode):
    """A call of a function whose backward asks."""

    function: Any = field(init=False)
    arguments: Sequence[int] = field(init=False)
    """Which arguments of the forward the weights are."""
    ctx: Any = None
    """A stand-in for W, with what the forward has left on the ctx."""

    def __post_init__(self) -> None:
        DeferredNode.__post_init__(self)
        self.function = function_of(self.node)
        self.arguments = arguments_of(self.node, self.places)

    def held_values(self) -> Iterable[Any]:
        return _tensors_in([self.operands, vars(self.ctx) if self.ctx else ()])

    def watch(self, reached_nodes: list[DeferredNode]) -> None:
        """Have I call the backward for the inputs alone."""
        node = self.node

        def run_input(*gradients: Tensor | None) -> Any:
            self.keep(gradients)
            reached_nodes.append(self)
            want(node, BackwardHalf.INPUT)
            results = run_backward(*gradients)
            _warn_of_unwanted(self.function, _listed(results), self.arguments, BackwardHalf.INPUT)
            return results  # autograd uses what I asks for

        run_backward = run_instead(node, run_input)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients and what the ctx holds; detached, since an output that is saved leads to the node."""
        node = self.node
        saved_tensors = tuple(None if tensor is None else detached(tensor) for tensor in node.saved_tensors)
        self.hold(gradients, unchanging=[*saved_tensors, *gradients])
        self.ctx = SimpleNamespace(**{name: value for name, value in vars(node).items() if name != "apply"})
        self.ctx.saved_tensors = saved_tensors
        self.ctx.needs_input_grad = tuple(number in self.arguments for number in range(len(node.needs_input_grad)))
        want(self.ctx, BackwardHalf.WEIGHT)

    def release(self) -> None:
        run_instead(self.node, None)
        self.node = None

    def gradients(self) -> Sequence[Tensor | None]:
        """Call the backward for the weights alone.

        Raises:
            PipelineError: a saved tensor was changed in place since I ran, or there are too few gradients.
        """
        ctx, name = self.ctx, self.function.__name__
        subject = f"{name}: a tensor of shape {{shape}} that it saved, or a gradient of its output, was"
        gradients_of_outputs = self.take_operands(subject, "Save a copy (clone())")
        results = _listed(backward_of(self.function)(ctx, *gradients_of_outputs))
        self.ctx = None
        if len(results) <= max(self.arguments):
            raise PipelineError(
                f"{name}.backward: in the `W` of a split backward it returned {len(results)} gradients, expected "
                f"{len(ctx.needs_input_grad)}, one for each argument of the forward; return None for those that are "
                "not wanted"
            )
        input_arguments = [number for number in range(len(results)) if number not in self.arguments]
        _warn_of_unwanted(self.function, results, input_arguments, BackwardHalf.WEIGHT)
        return [fitted(results[argument], root) for argument, root in zip(self.arguments, self.roots, strict=True)]


def _warn_of_unwanted(function: Any, results: Sequence[Any], arguments: Sequence[int], half: BackwardHalf) -> None:
    """Say once per function and argument that a gradient of these was not wanted; it is dropped."""
    if _WARNED not in vars(function):
        setattr(function, _WARNED, set())
    warned = vars(function)[_WARNED]
    question = "wants_weight_gradient" if half is BackwardHalf.INPUT else "wants_input_gradient"
    for argument in arguments:
        if argument < len(results) and results[argument] is not None and (argument, half) not in warned:
            warned.add((argument, half))
            warn(
                f"{function.__name__}.backward: in the `{half.value}` of a split backward it returned a gradient for "
                f"{_name_of(function, argument)}, which was not wanted there. It is dropped; the gradients are right, "
                f"but this one was computed twice. Expected None where ps.{question}(ctx) is False"
            )


def _name_of(function: Any, argument: int) -> str:
    """Name an argument of the forward, which begins with ctx unless the function has a `setup_context`."""
    names = list(inspect.signature(function.forward).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]
    is_named = argument < len(names) and names[argument].kind is not inspect.Parameter.VAR_POSITIONAL
    return f"its argument `{names[argument].name}`" if is_named else f"its argument number {argument + 1}"


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors_in(element)
