"""`Stage`: one consecutive slice of the model on one rank, run forward and backward apart from its neighbours.

Inputs are detached leaves, so a backward ends at the stage's border. Of the outputs only the `GradientEdge`s are kept:
the tensors themselves are free as soon as they have been handed on.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.execute.deferred_weights import DeferredWeights
from penstock.execute.keywords import keyword_names, run_layers
from penstock.execute.tree import flatten


@dataclass(slots=True)
class SavedForward:
    """What a forward leaves behind for its backward."""

    inputs: list[Tensor]
    """The input leaves that need a gradient."""
    edges: list[GradientEdge]
    """Where the gradients of the outputs that need one enter the graph."""
    loss_gradients: list[Tensor]
    """On the last stage, the gradient of the loss by itself, one per edge; else empty."""
    deferred: DeferredWeights | None = None
    """Of a forward whose backward is to run in two parts, what the first leaves for the second."""


class Stage:
    """The layers of one stage.

    `layers` maps names, as in the unsplit model, to modules; they are used in place.
    """

    def __init__(self, index: int, layers: Mapping[str, nn.Module]) -> None:
        self.index = index
        self.layers = dict(layers)
        self._modules = list(self.layers.values())
        self.is_split = False
        """Whether forwards leave the gradients of weights for later, so that backwards may run in two parts."""
        self.is_examined = False
        """Whether the first split backward has shown what cannot be left for later."""
        self._deferred: DeferredWeights | None = None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with the unsplit model's names; a parameter used twice is listed once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for layer_name, module in self.layers.items():
            for name, parameter in module.named_parameters():
                found.setdefault(id(parameter), (f"{layer_name}.{name}", parameter))
        return list(found.values())

    def keyword_names(self) -> set[str]:
        """Return the keyword arguments that the layers' forwards name."""
        return {name for module in self._modules for name in keyword_names(module)}

    def forward(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the layers one after another; the first gets all inputs, the others the result before them."""
        if not (self.is_split and torch.is_grad_enabled()):
            return run_layers(self._modules, inputs, keywords)
        with DeferredWeights() as self._deferred:
            return run_layers(self._modules, inputs, keywords)

    def save(self, inputs: Any, outputs: Any) -> SavedForward:
        """Keep what the backward of the forward just run needs, and nothing else."""
        deferred, self._deferred = self._deferred, None
        edges = [get_gradient_edge(tensor) for tensor in _needing_gradient(outputs)]
        return SavedForward(_needing_gradient(inputs), edges, [], deferred)

    def save_loss(self, inputs: Any, loss: Tensor | None) -> SavedForward:
        """Keep what the backward needs that starts at the loss; without a loss it adds nothing."""
        saved = self.save(inputs, loss)
        saved.loss_gradients = [torch.ones_like(root) for root in _needing_gradient(loss)]
        return saved

    def backward(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add to the gradients of the weights and return those of the inputs, one for each saved input.

        `gradients` holds one tensor per saved edge. An input that did not take part gets zeros.
        """
        results = self.backward_input(saved, gradients)
        self.backward_weight(saved)
        return results

    def backward_input(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward up to what the forward left for later, and let go of the rest."""
        with saved.deferred or nullcontext():
            if saved.edges:
                torch.autograd.backward(saved.edges, gradients)
        results = []
        for leaf in saved.inputs:
            results.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        saved.inputs, saved.edges, saved.loss_gradients = [], [], []
        return results

    def backward_weight(self, saved: SavedForward) -> None:
        """Add what `backward_input` has left to the gradients of the weights."""
        if saved.deferred is not None:
            saved.deferred.add_gradients()
            saved.deferred = None

    def set_training(self, is_training: bool) -> None:
        """Switch all layers between training and evaluation."""
        for module in self._modules:
            module.train(is_training)


def _needing_gradient(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
