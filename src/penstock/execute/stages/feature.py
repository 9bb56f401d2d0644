"""Features of a stage, beside running its layers: the protocol of skips, carried state, added losses, random numbers.

    forward    begin -> arrive -> around_forward(layers) -> leave -> around_loss(loss function)
    backward   roots -> around_backward(autograd) -> take_gradients

In autograd's terms, a feature may add leaves and roots to the graph of a forward, see what arrives and leaves, and run
something around it. A stage has its features in one order, which is that of autograd's roots, hence of bits; the first
one is outermost. A stage without features does none of this.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.stages.stage import modules_of
from penstock.execute.step import Step

BeforeLayer = Callable[[int], None]
"""Takes the place of a layer in the unsplit model."""
Copied = Callable[[Any], Any]
"""Returns a value with copies of its tensors that lie in gathered weights."""
Roots = tuple[list[GradientEdge], list[Tensor]]
"""The edges of a graph's outputs, and the gradient of each."""


class ForwardPart:
    """A feature in one forward, kept until its backward has run. Every default does nothing."""

    begins_backwards = False
    """Whether a backward may begin here, whatever becomes of the stage's outputs."""

    @property
    def before_layer(self) -> BeforeLayer | None:
        """A function to call before each layer, if any; at most one feature of a stage has it."""
        return None

    def arrive(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what the layers get, from what came to the stage."""
        return inputs

    def around_forward(self) -> AbstractContextManager[object]:
        """Return a context for the layers."""
        return nullcontext()

    def leave(self, outputs: Any) -> Any:
        """Return what leaves the stage, from what the layers returned."""
        return outputs

    def around_loss(self) -> AbstractContextManager[object]:
        """Return a context for the loss function, on a last stage."""
        return nullcontext()

    def without_passing(self, inputs: Any, outputs: Any) -> tuple[Any, Any]:
        """Return what came and what left, for the backward: what the stage only passes on, without its values."""
        return inputs, outputs

    @property
    def leaves(self) -> list[Tensor]:
        """Further inputs that need a gradient."""
        return []

    def roots(self) -> Roots:
        """Return further outputs with their gradients; called right before the backward."""
        return [], []

    def around_backward(self) -> AbstractContextManager[object]:
        """Return a context for the backward, in which layers may run again."""
        return nullcontext()

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Get the gradients of `leaves`."""

    def again(self) -> "ForwardPart":
        """Return the part for the same forward when it runs again (`recompute`); called when it has run."""
        return self


class OutlivingPart(ForwardPart):
    """One forward of a stage whose weights are gathered: copies what leaves it in their memory, which is freed soon.

    A layer may return a view of a weight, put it as a skip, or leave it for a later slice. This is the outermost
    feature, which sees all that leaves.
    """

    def __init__(self, copied: Copied) -> None:
        self._copied = copied

    def leave(self, outputs: Any) -> Any:
        return self._copied(outputs)


StageFeature = Callable[[Step, MicrobatchKey], ForwardPart]
"""A feature of one stage: returns what to do in the forward of a microbatch (or slice)."""


def modules_with(layers: Iterable[nn.Module], protocol: type) -> list[Any]:
    """Return the modules of some layers that have all methods of a protocol, each once."""
    return [module for module in modules_of(layers) if has_methods(module, protocol)]


def has_methods(module: nn.Module, protocol: type) -> bool:
    """Return whether a module's class has all public methods of a protocol.

    `isinstance` with a protocol would read the module's attributes, and to read the `weight` of a parametrized layer
    computes it, which changes the state of `spectral_norm`.
    """
    names = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    return all(callable(getattr(type(module), name, None)) for name in names)
