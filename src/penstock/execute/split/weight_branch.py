"""A branch of the graph that computes weights and meets the activations at its entry; its backward waits for W.

    I   autograd hands over the gradient that arrives at the entry and stops there
    W   the entry runs by itself, the rest of the branch in autograd's backward

Hooks of the tensor at the entry see the gradient in I. In W the entry must not run in a backward: they would see it a
second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.deferred import Rung, fitted
from penstock.execute.split.wanted import Part, want
from penstock.execute.undocumented import is_function, metadata_at, num_outputs, run_node, saved_tensors


@dataclass(slots=True, eq=False)
class WeightBranch:
    """A branch, entered at `node` from others that I runs."""

    node: Any
    parameters: Sequence[Tensor]
    inner: Sequence[Node]
    """The nodes behind the entry, leaves included."""
    num_multiplications: float
    rung: Rung = Rung.BRANCH
    outputs: list[int] = field(default_factory=list)
    """Which outputs of the entry others use."""
    roots: Sequence[GradientEdge] = ()
    arrived: list[Tensor | None] = field(default_factory=list)
    """Those of all outputs of the entry, between I and W."""

    def __post_init__(self) -> None:
        self.roots = [GradientEdge(node, number) for node, number in self.node.next_functions if node is not None]

    @property
    def kept(self) -> list[Tensor]:
        """The gradients, and what the branch has saved in the forward."""
        if not self.arrived:
            return []
        saved = [tensor for node in (self.node, *self.inner) for tensor in saved_tensors(node)]
        return [each for each in (*self.arrived, *saved) if each is not None and not isinstance(each, nn.Parameter)]

    @property
    def is_complete(self) -> bool:
        """Whether a gradient comes to each output; a function in Python may expect that."""
        return not is_function(self.node) or len(self.outputs) == num_outputs(self.node)

    def add_output(self, number: int) -> None:
        """Note that I comes to an output of the entry."""
        if number not in self.outputs:
            self.outputs.append(number)

    def edges(self) -> list[GradientEdge]:
        """Return where the gradients arrive."""
        return [GradientEdge(self.node, number) for number in self.outputs]

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of `edges`."""
        self.arrived = [None] * num_outputs(self.node)
        for number, gradient in zip(self.outputs, gradients, strict=True):
            self.arrived[number] = gradient

    def release(self) -> None:
        """Forget the node if no gradient has come; otherwise W needs it, and holds nothing that leads to it by that."""
        if not self.arrived:
            self.node, self.inner = None, ()

    def gradients(self) -> Sequence[Tensor | None]:
        """Run the entry, and forget it."""
        node, gradients = self.node, self.arrived
        self.node, self.arrived, self.inner = None, [], ()
        if is_function(node):
            want(node, Part.WEIGHT)
            gradients = [_zeros(node, number) if each is None else each for number, each in enumerate(gradients)]
        places = [place for place, (following, _) in enumerate(node.next_functions) if following is not None]
        found = run_node(node, gradients, places)
        return [fitted(gradient, root) for gradient, root in zip(found, self.roots, strict=True)]


def _zeros(node: Node, number: int) -> Tensor:
    expected = metadata_at(GradientEdge(node, number))
    return torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
