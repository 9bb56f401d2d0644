"""`DeferredNode`: a node of a graph whose weight gradients a split backward leaves for W.

Each way to defer weight gradients is a kind of it, in a file of its own:

    finder(node, graph)   a walk asks it at each node: returns what can wait there, or None (finders.py)
    watch                 before I: have I keep what W needs when it comes to the node
    keep                  in I: keep it
    release               after I: forget the node
    gradients             in W: compute the weight gradients from what was kept

It holds a node until I has run, then the tensors that W needs, and nothing afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.errors import PipelineError
from penstock.execute.split.weight_graph import WeightGraph, WeightOrigin
from penstock.execute.undocumented import metadata_at, version_of
from penstock.execute.values.tensors import memory_of

COPY = "Let the layer use a copy (clone()) of what it changes, such as a buffer"


@dataclass(slots=True, eq=False)
class DeferredNode:
    """A node whose weight gradients wait for W."""

    node: Any
    origin: WeightOrigin
    """The parameters that its weights are made of, and the nodes between."""
    places: Sequence[int]
    """Which of the node's next functions lead to weights that need a gradient."""
    mechanism: str
    """How the gradients wait, for debug output."""
    num_multiplications: float
    """Multiplications that the weight gradients take; infinite where their number says nothing of the time."""
    roots: Sequence[GradientEdge] = field(init=False)
    """Where the weight gradients enter the graph that leads to the parameters, one per place."""
    operands: Sequence[Any] = field(init=False, default=())
    """Values from which W computes the gradients; empty before I and after W."""
    can_wait: bool = field(init=False, default=True)
    """Whether nobody else keeps what W would need, who may be asked for it only once."""
    is_read_in_turn: bool = field(init=False, default=False)
    """Whether `keep` has to be called as the backward comes to the node, and not after it."""
    _versions: Sequence[tuple[Tensor, int]] = field(init=False, default=())
    """Versions of the operands that must not be changed in place between I and W."""

    is_branch_entry = False
    """Whether W runs the node itself: I ends at it, and hands over the gradients that arrive there."""

    def __post_init__(self) -> None:
        next_functions = self.node.next_functions
        self.roots = [GradientEdge(*next_functions[place]) for place in self.places]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that get the gradients."""
        return self.origin.parameters

    @property
    def is_complete(self) -> bool:
        """Whether all gradients arrive that the node has to be run with."""
        return True

    @property
    def held_tensors(self) -> list[Tensor]:
        """The tensors that it holds for W; parameters, and views of those that get the gradients, are there anyway."""
        parameter_memory = {memory_of(parameter) for parameter in self.parameters}
        held_tensors = [
            tensor
            for tensor in self.held_values()
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
        ]
        return [
            tensor
            for tensor in held_tensors
            if tensor.layout is not torch.strided or memory_of(tensor) not in parameter_memory
        ]

    def held_values(self) -> Iterable[Any]:
        """Return the values that it holds for W, tensors among them."""
        return self.operands

    def hold(self, operands: Sequence[Any], unchanging: Sequence[Any]) -> None:
        """Hold operands until W, some of which must not be changed in place until then."""
        self.operands = operands
        self._versions = [(tensor, version_of(tensor)) for tensor in unchanging if isinstance(tensor, Tensor)]

    def take_operands(self, subject: str, fix: str = COPY) -> Sequence[Any]:
        """Return the operands, and hold them no longer.

        Raises:
            PipelineError: one was changed in place; `subject` says what it is, `fix` what to do.
        """
        for tensor, expected in self._versions:
            if version_of(tensor) != expected:
                raise PipelineError(
                    f"{subject.format(shape=tuple(tensor.shape))} changed in place between I and W of a split "
                    f"backward: at version {version_of(tensor)}, expected {expected}. {fix}, or run a schedule with "
                    "whole backwards"
                )
        operands, self.operands, self._versions = self.operands, (), ()
        return operands

    def arrive(self, number: int) -> None:
        """Note that I comes to this output of the node."""

    def target_edges(self, *, captures_gradients: bool) -> Sequence[GradientEdge]:
        """Return the edges that I must be told to reach: one to the node, if nothing but weights is behind it.

        I comes to any other node on its way to further leaves. With `captures_gradients` I stops at these edges and
        returns their gradients, which `keep` then gets.
        """
        leads_on = any(
            node is not None for place, (node, _) in enumerate(self.node.next_functions) if place not in self.places
        )
        return () if leads_on else (GradientEdge(self.node, 0),)

    def watch(self, reached_nodes: list["DeferredNode"]) -> None:
        """Have the backward that runs the node keep what W needs, and then add this to a list."""

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what W needs, with the gradients that have come to the node."""

    def release(self) -> None:
        """Forget the node, which knows this by what `watch` did: together they would live on."""
        self.node = None

    def gradients(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, and release everything.

        Raises: PipelineError, where something that was kept has been changed in place since I ran.
        """
        raise AssertionError("each kind has its own")


Finder = Callable[[Node, WeightGraph], DeferredNode | None]
"""Returns the weight gradients of a node that can wait, or None."""


def detached(tensor: Tensor) -> Tensor:
    """Return a saved tensor without the graph behind it, which it would hold; nothing is behind a parameter."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach()


def fitted(gradient: Tensor | None, edge: GradientEdge) -> Tensor | None:
    """Return a gradient in the shape and type that belong to an edge, as autograd makes of what a function returns."""
    if gradient is None:
        return None
    expected = metadata_at(edge)
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)
