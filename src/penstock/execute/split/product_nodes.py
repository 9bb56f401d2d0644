"""Reads products of activations and weights off autograd's graph, and computes the gradients of their weights.

A node of autograd shows what its function saved as attributes, `_saved_NAME` and `_raw_saved_NAME` (see "Saved tensors"
in torch's notes on autograd). Each product here follows the node's own formula, operation for operation, so that
nothing changes but the moment.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.errors import PipelineError
from penstock.execute.split.late_gradients import LateGradient
from penstock.execute.undocumented import version_of

Gradients = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""From the gradient of the output and the activations, those of the weights."""
_UNSIGNED = 2**64


class WaitingProduct(ABC):
    """One product in a graph; until the backward has come by it holds a node, then what its weights' gradients need."""

    __slots__ = (
        "_activations",
        "_node",
        "_version",
        "gradient",
        "num_multiplications",
        "parameters",
        "places",
        "roots",
    )

    def __init__(self, node: Node, places: Sequence[int], num_multiplications: float) -> None:
        self.places = places
        """Which of the node's next functions are those of the weights."""
        self.roots = [_edge(node, place) for place in places]
        """Where the weights' gradients enter the graph that leads to the parameters."""
        self.parameters: list[nn.Parameter] = []
        """What the weights are made of."""
        self.num_multiplications = num_multiplications
        """How many the gradients of the weights take; infinite where they say nothing of its time."""
        self._node: Any = node
        self._activations: Tensor | None = None
        self._version = 0
        self.gradient: Tensor | None = None

    @property
    @abstractmethod
    def is_hooked(self) -> bool:
        """Whether the activations are kept by others, such as checkpointing: they can be asked for only once."""

    def end(self) -> GradientEdge | None:
        """Return where the product's gradient arrives, if the weights are all that it leads to."""
        others = [node for place, (node, _) in enumerate(self._node.next_functions) if place not in self.places]
        return GradientEdge(self._node, 0) if others.count(None) == len(others) else None

    def watch(self, late: list[LateGradient]) -> None:
        """Have the backward that comes by keep what the weights' gradients need, and note the product.

        It raises torch's own error if the activations have been changed in place.
        """

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                self._activations = self._saved_activations().detach()
                self._version = version_of(self._activations)
                self.gradient = gradients[0]
                late.append(self)

        self._node.register_prehook(keep)

    def let_go(self) -> None:
        """Forget the node, whose hook knows the product: together they would live on."""
        self._node = None

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the weights, one per root, and let go of everything.

        Raises:
            PipelineError: if the activations have been changed in place since the backward came by.
        """
        activations, gradient = self._activations, self.gradient
        assert activations is not None
        assert gradient is not None
        self._activations = self.gradient = None
        require_unchanged(activations, self._version)
        return self._weight_gradients(gradient, activations)

    @abstractmethod
    def _saved_activations(self) -> Tensor:
        """What the node has kept of the activations."""

    @abstractmethod
    def _weight_gradients(self, gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
        """The gradients of the weights, one per root."""


class ProductNode(WaitingProduct):
    """A product that autograd has a node of its own for, with a formula that is known."""

    __slots__ = ("_gradients", "_name")

    def __init__(
        self, node: Node, name: str, places: Sequence[int], gradients: Gradients, num_multiplications: float
    ) -> None:
        super().__init__(node, places, num_multiplications)
        self._name = name
        self._gradients = gradients

    @property
    def is_hooked(self) -> bool:
        return getattr(self._node, f"_raw_saved_{self._name}").unpack_hook is not None

    def _saved_activations(self) -> Tensor:
        saved: Tensor = getattr(self._node, f"_saved_{self._name}")
        return saved

    def _weight_gradients(self, gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
        return self._gradients(gradient, activations)


def require_unchanged(activations: Tensor, version: int) -> None:
    """Refuse activations that were changed in place between the two parts of a backward. Raises: PipelineError."""
    if version_of(activations) != version:
        raise PipelineError(
            f"what was multiplied by weights in a forward, of shape {tuple(activations.shape)}, was changed in place "
            f"between the input and the weight part of the backward: it is at version {version_of(activations)}, "
            f"expected {version}. Let the layer use a copy (clone()) of what it changes, such as a buffer, or run a "
            "schedule with whole backwards"
        )


def keeps_elsewhere(node: Node) -> bool:
    """Whether what a node keeps for its backward is kept by others, such as checkpointing or offloading."""
    for name in _kept_by(type(node)):
        kept = getattr(node, name)
        if any(each.unpack_hook is not None for each in (kept if isinstance(kept, Sequence) else (kept,))):
            return True
    return False


@cache
def _kept_by(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _edge(node: Node, place: int) -> GradientEdge:
    following, index = node.next_functions[place]
    assert following is not None
    return GradientEdge(following, index)


def read_product(node: Node, kind: str) -> ProductNode | None:
    """Return a node, of a kind of autograd's, as a product, whatever its factors; None where no formula is known."""
    reader = _READERS.get(kind)
    return None if reader is None else reader(node)


def _mm(node: Any) -> ProductNode | None:
    return _matrices(node, "self", 1)


def _addmm(node: Any) -> ProductNode | None:
    return _matrices(node, "mat1", 2) if node._saved_alpha == node._saved_beta == 1 else None


def _matrices(node: Any, name: str, place: int) -> ProductNode | None:
    if node.next_functions[place][0] is None:
        return None
    (num_inputs, num_outputs), strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    num_rows = getattr(node, f"_saved_{name}_sym_sizes")[0]
    is_transposed = strides[0] == 1 and strides[1] == num_inputs
    formula = _transposed_gradient if is_transposed else _gradient
    return ProductNode(node, name, (place,), formula, num_rows * num_inputs * num_outputs)


def _gradient(gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
    return (activations.t().conj().mm(gradient),)


def _transposed_gradient(gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
    return (gradient.t().mm(activations.conj()).t(),)


def _bmm(node: Any) -> ProductNode | None:
    if node.next_functions[1][0] is None:
        return None
    return ProductNode(node, "self", (1,), _batched_gradient, math.inf)


def _batched_gradient(gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
    return (activations.transpose(1, 2).conj().bmm(gradient),)


def _convolution(node: Any) -> ProductNode | None:
    places = [place for place in (1, 2) if node.next_functions[place][0] is not None]
    if not places:
        return None
    is_hooked = node._raw_saved_weight.unpack_hook is not None  # then the activations are, too, and it is not used
    kernel = None if is_hooked else node._saved_weight.detach()
    bias_sizes = node._saved_bias_sym_sizes_opt
    geometry = node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed
    others = node._saved_output_padding, node._saved_groups, (False, 1 in places, 2 in places)

    def gradients(gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
        found = torch.ops.aten.convolution_backward(gradient, activations, kernel, bias_sizes, *geometry, *others)
        return [found[place] for place in places]

    return ProductNode(node, "input", places, gradients, math.inf)


def _embedding(node: Any) -> ProductNode | None:
    num_rows, padding = node._saved_weight_sym_argsize_0, node._saved_padding_idx
    padding -= _UNSIGNED * (padding >= _UNSIGNED // 2)  # torch shows -1, which is none, as a very large number
    others = node._saved_scale_grad_by_freq, node._saved_sparse

    def gradients(gradient: Tensor, activations: Tensor) -> Sequence[Tensor]:
        return (torch.ops.aten.embedding_backward(gradient, activations, num_rows, padding, *others),)

    return ProductNode(node, "indices", (0,), gradients, math.inf)


_READERS: dict[str, Callable[[Any], ProductNode | None]] = {
    "MmBackward0": _mm,
    "AddmmBackward0": _addmm,
    "BmmBackward0": _bmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}
