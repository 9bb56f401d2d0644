"""One product whose weight gradients a backward leaves for later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import PipelineError
from penstock.execute.split.deferred import Deferred, Rung
from penstock.execute.split.formulas import Formula, Weights
from penstock.execute.undocumented import version_of


@dataclass(slots=True, eq=False)
class DeferredProduct:
    """A product in a graph. It holds a node until the backward has run, then what W needs, and nothing afterwards."""

    node: Any
    formula: Formula
    weights: Weights
    places: Sequence[int]
    """Which of the node's next functions are those of weights that need a gradient."""
    open: Callable[[Any], Tensor]
    """Gets the activations from the node."""
    is_hooked: bool = False
    """Whether the activations are kept by others, such as checkpointing: then they can be asked for only once."""
    rung: Rung = Rung.PRODUCT
    parameters: Sequence[Tensor] = ()
    """What the weights are made of, often themselves."""
    roots: Sequence[GradientEdge] = field(init=False)
    """Where the weight gradients enter the graph that leads to the parameters."""
    gradient: Tensor | None = None
    """That of the output, between I and W."""
    activations: Tensor | None = None
    """Between I and W."""
    _activations_version: int = 0

    def __post_init__(self) -> None:
        following = self.node.next_functions
        self.roots = [GradientEdge(*following[place]) for place in self.places]

    @property
    def num_multiplications(self) -> float:
        """How many the weight gradients take."""
        return self.formula.num_multiplications

    @property
    def kept(self) -> list[Tensor]:
        """What W needs, parameters apart."""
        found = (self.gradient, self.activations, *self.weights)
        return [each for each in found if each is not None and not isinstance(each, nn.Parameter)]

    def end(self) -> GradientEdge | None:
        """Return where the output's gradient arrives, if the weights are all that the product leads to."""
        others = [node for place, (node, _) in enumerate(self.node.next_functions) if place not in self.places]
        return GradientEdge(self.node, 0) if others.count(None) == len(others) else None

    def handover(self) -> GradientEdge | None:
        """Return the end: the product need not run."""
        return self.end()

    def watch(self, found: list[Deferred]) -> None:
        """Have the backward that comes through the node keep what W needs, and add the product to a list.

        It raises torch's own error if the activations have been changed in place.
        """

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            # Before the node runs: afterwards autograd has freed what it saved.
            if gradients[0] is not None:
                self.take(gradients)
                found.append(self)

        self.node.register_prehook(keep)

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the activations and the gradient of the output."""
        self.activations = self.open(self.node).detach()
        self._activations_version = version_of(self.activations)
        self.gradient = gradients[0]

    def release(self) -> None:
        """Forget the node, whose hook knows the product: together they would live on."""
        self.node = None

    def gradients(self) -> Sequence[Tensor | None]:
        """Return the gradients of the weights, one per root, and release everything.

        Raises:
            PipelineError: if the activations have been changed in place since the backward ran.
        """
        activations, gradient, weights = self.activations, self.gradient, self.weights
        assert activations is not None
        assert gradient is not None
        self.activations = self.gradient = None
        self.weights = ()
        if version_of(activations) != self._activations_version:
            raise PipelineError(
                f"activations of shape {tuple(activations.shape)}, which a layer multiplied by its weights, were "
                f"changed in place between I and W of a split backward: they are at version {version_of(activations)}, "
                f"expected {self._activations_version}. Let the layer use a copy (clone()) of what it changes, such as "
                "a buffer, or run a schedule with whole backwards"
            )
        found = weight_gradients(self.formula, gradient, activations, weights)
        return [each for each in found if each is not None]


def weight_gradients(formula: Formula, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
    """Return the gradients of the weights in the weights' types, from which that of the product may differ."""
    found = formula.weight_gradients(gradient, activations, weights)
    return [
        each if each is None or weight is None or each.dtype == weight.dtype else each.to(weight.dtype)
        for each, weight in zip(found, weights, strict=True)
    ]
