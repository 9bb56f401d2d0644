"""Products of activations and weights, and the table of autograd's nodes that are one.

    I   the backward comes to the product; its activations and the gradient of its output are kept
    W   the weight gradients, by autograd's own formula

Only products are worth running later: a matrix product, a convolution, a table look-up. The weights of a norm, a gate
or a scale take their gradient from the same pass over the data as the activations do, so to defer it would cost a pass.
Each formula follows autograd's own, operation for operation, so that nothing changes but the moment. To add one, write
its reader and its row in `NODES`, and a test of what they count on in tests/execute/test_undocumented.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from penstock.execute.split.deferred_node import DeferredNode, Finder, detached
from penstock.execute.split.weight_graph import WeightGraph, open_places
from penstock.execute.undocumented import (
    ADDMM,
    BMM,
    CONVOLUTION,
    EMBEDDING,
    MM,
    convolution_backward,
    embedding_backward,
    is_checkpointed,
    is_saved_elsewhere,
    saved,
    saved_before_run,
    saved_padding,
)

Formula = Callable[..., Sequence[Tensor | None]]
"""Gets the gradient of the output and what the node has saved, the activations first; returns the gradients of the
weights, None for those that need none. It holds no tensors."""
Reader = Callable[[Node, Sequence[int]], tuple[float, Formula] | None]
"""Gets a node and the places of its weights that need gradients. Returns how many multiplications these take, infinite
where they say nothing of the time, and the formula; None where it is not known."""


@dataclass(slots=True, eq=False)
class Product(DeferredNode):
    """A product whose weight gradients wait."""

    formula: Formula
    names: Sequence[str]
    """Names under which the node has saved what the formula takes."""

    def watch(self, reached_nodes: list[DeferredNode]) -> None:
        """Have the backward that comes through the node keep what W needs, and add the product to a list.

        It raises torch's own error if the activations have been changed in place.
        """

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            # A prehook runs before the node does: afterwards autograd has freed what the node saved.
            if gradients[0] is not None:
                self.keep(gradients)
                reached_nodes.append(self)

        self.node.register_prehook(keep)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        saved_operands = [detached(saved_before_run(self.node, name)) for name in self.names]
        self.hold([gradients[0], *saved_operands], unchanging=[gradients[0], saved_operands[0]])

    def gradients(self) -> Sequence[Tensor | None]:
        operands = self.take_operands(
            "activations of shape {shape}, which a layer multiplied by its weights, or the gradient of their product, "
            "were"
        )
        return [gradient for gradient in self.formula(*operands) if gradient is not None]


def _finder(read: Reader, names: Sequence[str], places: Sequence[int]) -> Finder:
    """Find products in nodes that have saved the activations under the first of the names; `places` are of weights."""

    def find(node: Node, graph: WeightGraph) -> Product | None:
        weight_places = open_places(node, places)
        origin = graph.origin_at(node, weight_places)
        reading = None if origin is None else read(node, weight_places)
        if origin is None or reading is None:
            return None
        num_multiplications, formula = reading
        # Nobody knows how long it takes to lead the gradient on through other nodes.
        way = ("product", num_multiplications) if origin.is_plain else ("weight branch", math.inf)
        product = Product(node, origin, weight_places, *way, formula, names)
        # Checkpointing and `save_on_cpu` are no reason here, as they are for other nodes: `keep` reads before the node.
        product.can_wait = not any(is_saved_elsewhere(node, name) for name in names)
        product.is_read_in_turn = any(is_checkpointed(node, name) for name in names)
        return product

    return find


def _read_mm(node: Node, places: Sequence[int]) -> tuple[float, Formula] | None:
    return _read_matrices(node, saved(node, "self_sym_sizes")[0])


def _read_addmm(node: Node, places: Sequence[int]) -> tuple[float, Formula] | None:
    if not saved(node, "alpha") == saved(node, "beta") == 1:
        return None
    return _read_matrices(node, saved(node, "mat1_sym_sizes")[0])


def _read_matrices(node: Node, num_rows: int) -> tuple[float, Formula] | None:
    (num_inputs, num_outputs), strides = saved(node, "mat2_sym_sizes"), saved(node, "mat2_sym_strides")
    if not strides:  # a sparse weight
        return None
    is_column_major = strides[0] == 1 and strides[1] == num_inputs

    def formula(gradient: Tensor, rows: Tensor) -> list[Tensor]:
        rows = rows.conj()
        # The gradient has the memory format of the weight.
        return [gradient.t().mm(rows).t() if is_column_major else rows.t().mm(gradient)]

    return num_rows * num_inputs * num_outputs, formula


def _read_bmm(node: Node, places: Sequence[int]) -> tuple[float, Formula]:
    return math.inf, lambda gradient, activations: [activations.transpose(1, 2).conj().bmm(gradient)]


def _read_convolution(node: Node, places: Sequence[int]) -> tuple[float, Formula]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    stride, padding, dilation, is_transposed, output_padding, groups = [saved(node, name) for name in names]
    geometry = stride, padding, dilation, is_transposed, output_padding, groups
    bias_sizes, needs = saved(node, "bias_sym_sizes_opt"), (False, 1 in places, 2 in places)

    def formula(gradient: Tensor, activations: Tensor, kernel: Tensor) -> list[Tensor | None]:
        return convolution_backward(gradient, activations, kernel, geometry, bias_sizes, needs)

    return math.inf, formula


def _read_embedding(node: Node, places: Sequence[int]) -> tuple[float, Formula]:
    options = saved(node, "scale_grad_by_freq"), saved(node, "sparse")
    table = saved(node, "weight_sym_argsize_0"), saved_padding(node), *options
    return math.inf, lambda gradient, rows: [embedding_backward(gradient, rows, *table)]


NODES: dict[str, Finder] = {
    MM: _finder(_read_mm, ["self"], [1]),
    ADDMM: _finder(_read_addmm, ["mat1"], [2]),
    BMM: _finder(_read_bmm, ["self"], [1]),
    CONVOLUTION: _finder(_read_convolution, ["input", "weight"], [1, 2]),
    EMBEDDING: _finder(_read_embedding, ["indices"], [0]),
}
