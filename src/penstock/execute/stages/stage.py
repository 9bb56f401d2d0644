"""`Stage`: one consecutive slice of the model on one rank, run forward and backward apart from its neighbours.

Inputs are detached leaves, so a backward ends at the stage's border. Of the outputs only the `GradientEdge`s are kept:
the tensors themselves are free as soon as they have been handed on.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PipelineError
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.execute.split.plan import SplitPlan
from penstock.execute.stages.first_gradients import FirstGradients
from penstock.execute.stages.keywords import run_layers
from penstock.execute.stages.signatures import taken_keywords
from penstock.execute.stages.skips import Shelf, StageSkips
from penstock.execute.values.tree import flatten, needing_gradient

BeforeLayer = Callable[[int], None]
"""Takes the place of a layer in the unsplit model."""


@dataclass(slots=True)
class SavedForward:
    """What a forward leaves behind for its backward."""

    inputs: list[Tensor]
    """The input leaves that need a gradient."""
    edges: list[GradientEdge]
    """Where the gradients of the outputs that need one enter the graph."""
    loss_gradients: list[Tensor]
    """The gradients that begin here, of the loss and of what layers add, one for each of the last edges."""
    deferred: DeferredWeights | None = None
    """Of a forward whose backward is to run in two parts, what the first leaves for the second."""
    shelf: Shelf | None = None
    """Where layers that run again in the backward find the skips that they got."""


class Stage:
    """The layers of one stage.

    `layers` maps names, as in the unsplit model, to modules; they are used in place.
    """

    def __init__(self, index: int, layers: Mapping[str, nn.Module], first_layer: int = 0) -> None:
        self.index = index
        self.layers = dict(layers)
        self.first_layer = first_layer
        """The place of its first layer in the unsplit model."""
        self._modules = list(self.layers.values())
        self._names = list(self.layers)
        self._taken = list(map(taken_keywords, self._modules))
        self.split_plan = SplitPlan(self._modules)
        """How its backwards are split, if they are."""
        self.is_examined = False
        """Whether a split backward has shown what cannot be left for later."""
        self._is_split = False
        self._first_gradients = FirstGradients()
        self.skips: StageSkips | None = None
        """What its layers hand on past each other, or None if nothing."""
        self.drawing: Callable[[], AbstractContextManager[BeforeLayer]] | None = None
        """Entered around the layers of a forward, where random numbers are to depend on layer and microbatch."""
        self.adds_losses = False
        """Whether its layers add losses, whose backward begins here whatever becomes of its outputs."""
        self._deferred: DeferredWeights | None = None

    @property
    def is_split(self) -> bool:
        """Whether forwards leave the gradients of weights for later, so that backwards may run in two parts.

        To set it begins a step, for which it is decided anew how.
        """
        return self._is_split

    @is_split.setter
    def is_split(self, is_split: bool) -> None:
        self._is_split = is_split
        self.split_plan.begin_step()
        self._first_gradients.begin_step(parameter for module in self._modules for parameter in module.parameters())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with the unsplit model's names; a parameter used twice is listed once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for layer_name, module in self.layers.items():
            for name, parameter in module.named_parameters():
                found.setdefault(id(parameter), (f"{layer_name}.{name}", parameter))
        return list(found.values())

    def keyword_names(self) -> set[str]:
        """Return the keyword arguments that the layers can take; `EVERY` among them if one may take any."""
        return {name for taken in self._taken for name in taken.names()}

    def forward(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run the layers one after another; the first gets all inputs, the others the result before them."""
        run = self._run if self.skips is None else partial(self.skips.forward, self._run)
        if not (self.is_split and torch.is_grad_enabled()):
            return run(inputs, keywords)
        tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
        self._deferred = self.split_plan.start(sum([tensor.numel() for tensor in tensors]))
        with self._deferred.around_forward():
            return run(inputs, keywords)

    def save(self, inputs: Any, outputs: Any) -> SavedForward:
        """Keep what the backward of the forward just run needs, and nothing else."""
        deferred, self._deferred = self._deferred, None
        if self.skips is not None:
            inputs, outputs = self.skips.spared(inputs, outputs)
        edges = [get_gradient_edge(tensor) for tensor in needing_gradient(outputs)]
        shelf = None if self.skips is None else self.skips.pop_shelf()
        return SavedForward(needing_gradient(inputs), edges, [], deferred, shelf)

    def save_loss(self, inputs: Any, loss: Tensor | None) -> SavedForward:
        """Keep what the backward needs that starts at the loss; without a loss it adds nothing.

        Raises:
            PipelineError: no gradient leads from the loss to what this stage could train.
        """
        saved = self.save(inputs, loss)
        is_idle = loss is not None and not loss.requires_grad and not self.adds_losses
        if is_idle and (saved.inputs or self._is_trainable):
            raise PipelineError(
                f"stage {self.index}: its outputs need no gradient, so that nothing would be trained, though its "
                "inputs or its parameters do; let the last layers run without detach(), item() or no_grad(), or "
                "call evaluate"
            )
        saved.loss_gradients = [torch.ones_like(root) for root in needing_gradient(loss)]
        return saved

    def backward(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add to the gradients of the weights and return those of the inputs, one for each saved input.

        `gradients` holds one tensor per saved edge. An input that did not take part gets zeros.
        """
        if saved.deferred is not None and not saved.deferred.has_split_products:
            saved.deferred = None  # a schedule has whole backwards beside split ones, and they need no search
        results = self.backward_input(saved, gradients)
        self.backward_weight(saved)
        return results

    def backward_input(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward up to what the forward left for later, and let go of the rest."""
        skips = nullcontext() if self.skips is None else self.skips.on(saved.shelf)
        self._first_gradients.begin_backward()
        with skips:
            if saved.edges and saved.deferred is not None:
                saved.deferred.backward_input(saved.edges, gradients)
            elif saved.edges:
                torch.autograd.backward(saved.edges, gradients)
        saved.shelf = None
        results = []
        for leaf in saved.inputs:
            results.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        kept = [] if saved.deferred is None else saved.deferred.kept
        self._first_gradients.keep_apart([*gradients, *results, *kept])
        saved.inputs, saved.edges, saved.loss_gradients = [], [], []
        return results

    def backward_weight(self, saved: SavedForward) -> None:
        """Add what `backward_input` has left to the gradients of the weights."""
        if saved.deferred is not None:
            saved.deferred.backward_weight()
            saved.deferred = None

    def _run(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if self.drawing is None:
            return run_layers(self._modules, inputs, keywords, names=self._names, taken=self._taken)
        with self.drawing() as before_layer:
            return run_layers(
                self._modules,
                inputs,
                keywords,
                lambda index: before_layer(self.first_layer + index),
                names=self._names,
                taken=self._taken,
            )

    @property
    def _is_trainable(self) -> bool:
        return any(parameter.requires_grad for module in self._modules for parameter in module.parameters())

    def set_training(self, is_training: bool) -> None:
        """Switch all layers between training and evaluation."""
        for module in self._modules:
            module.train(is_training)
