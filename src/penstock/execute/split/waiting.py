"""`Waiting`: the weight gradients of one node of a graph, which a split backward leaves for W.

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
from penstock.execute.split.weight_graph import MadeOf, WeightGraph
from penstock.execute.undocumented import metadata_at, version_of
from penstock.execute.values.tensors import memory_of

COPY = "Let the layer use a copy (clone()) of what it changes, such as a buffer"


@dataclass(slots=True, eq=False)
class Waiting:
    """The weight gradients of one node."""

    node: Any
    made_of: MadeOf
    """The parameters that its weights are made of, and the nodes between."""
    places: Sequence[int]
    """Which of the node's next functions lead to weights that need a gradient."""
    how: str
    """How the gradients wait, for debug output."""
    num_multiplications: float
    """How many the weight gradients take; infinite where they say nothing of the time."""
    roots: Sequence[GradientEdge] = field(init=False)
    """Where the weight gradients enter the graph that leads to the parameters, one per place."""
    operands: Sequence[Any] = field(init=False, default=())
    """Between I and W: from what W computes the gradients."""
    can_wait: bool = field(init=False, default=True)
    """Whether nobody else keeps what W would need, who may be asked for it only once."""
    is_read_in_turn: bool = field(init=False, default=False)
    """Whether `keep` has to be called as the backward comes to the node, and not after it."""
    _versions: Sequence[tuple[Tensor, int]] = field(init=False, default=())
    """Those of operands that must not change meanwhile."""

    is_entry = False
    """Whether W runs the node itself: I ends at it, and hands over the gradients that arrive there."""

    def __post_init__(self) -> None:
        following = self.node.next_functions
        self.roots = [GradientEdge(*following[place]) for place in self.places]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that get the gradients."""
        return self.made_of.parameters

    @property
    def is_complete(self) -> bool:
        """Whether all gradients arrive that the node has to be run with."""
        return True

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that it holds for W; parameters, and views of those that get the gradients, are there anyway."""
        owned = {memory_of(parameter) for parameter in self.parameters}
        held = [each for each in self.held() if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
        return [each for each in held if each.layout is not torch.strided or memory_of(each) not in owned]

    def held(self) -> Iterable[Any]:
        """Return what it holds for W, tensors among it."""
        return self.operands

    def hold(self, operands: Sequence[Any], checked: Sequence[Any]) -> None:
        """Hold operands until W, some of which must not be changed in place until then."""
        self.operands = operands
        self._versions = [(each, version_of(each)) for each in checked if isinstance(each, Tensor)]

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

    def ends(self, *, hands_over: bool) -> Sequence[GradientEdge]:
        """Return where I must go for this alone: to the node, if nothing leads on from it but weights.

        With `hands_over` I stops there and hands over the gradients, which `keep` then gets.
        """
        leads_on = any(
            node is not None for at, (node, _) in enumerate(self.node.next_functions) if at not in self.places
        )
        return () if leads_on else (GradientEdge(self.node, 0),)

    def watch(self, found: list["Waiting"]) -> None:
        """Have the backward that runs the node keep what W needs, and then add this to a list."""

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what W needs, with the gradients that have come to the node."""

    def release(self) -> None:
        """Forget the node, which knows this by what `watch` did: together they would live on."""
        self.node = None

    def gradients(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, and release everything."""
        raise AssertionError("each kind has its own")


Finder = Callable[[Node, WeightGraph], Waiting | None]
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
