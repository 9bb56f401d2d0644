"""Products of activations and weights, and the table of where each is found.

    I   the backward comes to the product; its activations and the gradient of its output are kept
    W   the weight gradients, by autograd's own formula (formulas.py)

A product is found in two places:
    nodes       of autograd's graph, after a forward, which have saved the activations
    functions   that layers call, during a forward that splits its products (weight_grad_mode.py)
A product that is found in neither is run by autograd as ever, its weight gradients as part of I. To add one: write its
formula, its readers in `NODES` and `FUNCTIONS`, and a test of what they count on in tests/execute/test_undocumented.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from penstock.execute.split.formulas import (
    BatchedProduct,
    Convolution,
    Formula,
    MatrixProduct,
    TableLookUp,
    Weights,
    has_columns_first,
)
from penstock.execute.split.waiting import COPY, Finder, Waiting, not_parameters, require_version
from penstock.execute.split.weight_graph import MadeOf, WeightGraph, open_places
from penstock.execute.undocumented import (
    ADDMM,
    BMM,
    CONVOLUTION,
    EMBEDDING,
    MM,
    is_saved_elsewhere,
    saved,
    saved_padding,
    version_of,
)


@dataclass(slots=True, eq=False)
class CalledProduct:
    """One call of a function, seen as a product of activations and weights."""

    formula: Formula
    activations: Tensor
    weights: Sequence[Tensor | None]
    bias: Tensor | None = None
    """It is added, and stays in the graph: its gradient needs one pass over that of the output, best while at it."""
    shape: tuple[int, ...] | None = None
    """That of the function's output, where the formula's is another."""
    late_bias: Tensor | None = None
    """A bias that is added to the output once that has its shape."""

    def finish(self, output: Tensor) -> Tensor:
        """Turn what the formula returns into what the function returns."""
        if self.shape is not None:
            output = output.view(self.shape)
        return output if self.late_bias is None else output + self.late_bias


FromCall = Callable[..., CalledProduct | None]
"""Gets the arguments of a function; None for arguments with which it is no product, or none of a known formula."""


@dataclass(slots=True, eq=False)
class Product(Waiting):
    """A product whose weight gradients wait."""

    formula: Formula
    operands: Weights
    """The weights as the formula needs them for their gradients."""
    open: Callable[[Any], Tensor]
    """Gets the activations from the node."""
    gradient: Tensor | None = None
    """That of the output, between I and W."""
    activations: Tensor | None = None
    """Between I and W."""
    _activations_version: int = 0

    @property
    def kept(self) -> list[Tensor]:
        return not_parameters((self.gradient, self.activations, *self.operands))

    def watch(self, found: list[Waiting]) -> None:
        """Have the backward that comes through the node keep what W needs, and add the product to a list.

        It raises torch's own error if the activations have been changed in place.
        """

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            # Before the node runs: afterwards autograd has freed what it saved.
            if gradients[0] is not None:
                self.keep(gradients)
                found.append(self)

        self.node.register_prehook(keep)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        self.activations = self.open(self.node).detach()
        self._activations_version = version_of(self.activations)
        self.gradient = gradients[0]

    def gradients(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, and release everything.

        Raises:
            PipelineError: if the activations have been changed in place since the backward ran.
        """
        activations, gradient, operands = self.activations, self.gradient, self.operands
        assert activations is not None
        assert gradient is not None
        self.activations = self.gradient = None
        self.operands = ()
        subject = f"activations of shape {tuple(activations.shape)}, which a layer multiplied by its weights, were"
        require_version(activations, self._activations_version, subject, COPY)
        found = weight_gradients(self.formula, gradient, activations, operands)
        return [each for each in found if each is not None]


def way_of(made_of: MadeOf, formula: Formula) -> tuple[str, float]:
    """Return how the weights of a product wait, and how many multiplications their gradients take."""
    # Nobody knows how long it takes to lead the gradient on through other nodes.
    return ("product", formula.num_multiplications) if made_of.is_plain else ("weight branch", math.inf)


def weight_gradients(formula: Formula, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
    """Return the gradients of the weights in the weights' types, from which that of the product may differ."""
    found = formula.weight_gradients(gradient, activations, weights)
    return [
        each if each is None or weight is None or each.dtype == weight.dtype else each.to(weight.dtype)
        for each, weight in zip(found, weights, strict=True)
    ]


def read_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CalledProduct | None:
    """Return the call as a product, or None where it is none or its formula is not known here."""
    reader = FUNCTIONS.get(function)
    if reader is None or any(each.layout is not torch.strided for each in args if isinstance(each, Tensor)):
        return None
    return reader(*args, **kwargs)


def _finder(
    name: str, places: Sequence[int], read: Callable[[Node, Sequence[int]], tuple[Formula, Weights] | None]
) -> Finder:
    """Find products in nodes that have saved the activations under a name; `places` are those of the weights.

    `read` gets the places of the weights that need gradients, and returns the formula and the weights that it needs;
    None where the formula is not known.
    """

    def find(node: Node, graph: WeightGraph) -> Product | None:
        needed = open_places(node, places)
        made_of = graph.at(node, needed)
        operands = None if made_of is None else read(node, needed)
        if made_of is None or operands is None:
            return None
        way = way_of(made_of, operands[0])
        return Product(
            node, made_of, needed, *way, *operands, activations, is_kept_elsewhere=is_saved_elsewhere(node, name)
        )

    def activations(node: Node) -> Tensor:
        tensor: Tensor = saved(node, name)
        return tensor

    return find


# ---- matrix products


def _read_mm(node: Node, places: Sequence[int]) -> tuple[Formula, Weights]:
    return _read_matrices(node, saved(node, "self_sym_sizes")[0])


def _read_addmm(node: Node, places: Sequence[int]) -> tuple[Formula, Weights] | None:
    if not saved(node, "alpha") == saved(node, "beta") == 1:
        return None
    return _read_matrices(node, saved(node, "mat1_sym_sizes")[0])


def _read_matrices(node: Node, num_rows: int) -> tuple[Formula, Weights]:
    (num_inputs, num_outputs), strides = saved(node, "mat2_sym_sizes"), saved(node, "mat2_sym_strides")
    is_column_major = strides[0] == 1 and strides[1] == num_inputs
    return MatrixProduct(num_rows * num_inputs * num_outputs, is_column_major), (None,)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> CalledProduct | None:
    if input.dim() < 2 or not weight.requires_grad:
        return None
    if input.dim() == 2:
        return _matrix_product(input, weight.t(), weight, bias=bias)
    if bias is not None and input.is_contiguous():
        return _matrix_product(input, weight.t(), weight, bias=bias, shape=(*input.shape[:-1], weight.shape[0]))
    # torch adds the bias within the product for the others only
    leading, rows = _with_rows(input)
    return _matrix_product(rows, weight.t(), weight, leading, late_bias=bias)


def _matmul(input: Tensor, other: Tensor, **others: Any) -> CalledProduct | None:
    if others or input.dim() < 2 or not other.requires_grad:
        return None
    if input.dim() == other.dim() == 3 and input.shape[0] == other.shape[0]:
        return _bmm(input, other)
    if other.dim() != 2:
        return None
    leading, rows = _with_rows(input)
    return _matrix_product(rows, other, other, leading)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **others: Any) -> CalledProduct | None:
    return None if others else _matrix_product(mat1, mat2, mat2, bias=input)


def _matrix_product(
    activations: Tensor, right: Tensor, weight: Tensor, leading: tuple[int, ...] = (), **others: Any
) -> CalledProduct:
    num_multiplications = activations.numel() // max(activations.shape[-1], 1) * weight.numel()
    formula = MatrixProduct(num_multiplications, has_columns_first(right), right is not weight, leading)
    return CalledProduct(formula, activations, (weight,), **others)


def _with_rows(input: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the input of a layer; where rows have to be copied, its leading dimensions and the copy, to keep."""
    if not input.is_contiguous():
        dims = [each for each in zip(input.shape[:-1], input.stride()[:-1], strict=True) if each[0] != 1]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(dims)):
            return tuple(input.shape[:-1]), input.reshape(-1, input.shape[-1])
    return (), input


def _read_bmm(node: Node, places: Sequence[int]) -> tuple[Formula, Weights]:
    return BatchedProduct(), (None,)


def _bmm(input: Tensor, mat2: Tensor, **others: Any) -> CalledProduct | None:
    return None if others else CalledProduct(BatchedProduct(), input, (mat2,))


# ---- convolutions


def _read_convolution(node: Node, places: Sequence[int]) -> tuple[Formula, Weights]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    stride, padding, dilation, is_transposed, output_padding, groups = [saved(node, name) for name in names]
    geometry = stride, padding, dilation, is_transposed, output_padding, groups
    kernel = None
    if not is_saved_elsewhere(
        node, "weight"
    ):  # otherwise the activations are hooked, too, and the product is not deferred
        kernel = saved(node, "weight")
        kernel = kernel if isinstance(kernel, nn.Parameter) else kernel.detach()
    formula = Convolution(geometry, saved(node, "bias_sym_sizes_opt"), (1 in places, 2 in places))
    return formula, (kernel, None)


def _convolution(num_dims: int) -> FromCall:
    """Read calls of a convolution over so many dimensions of space."""

    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> CalledProduct | None:
        if input.dim() != num_dims + 2 or isinstance(padding, str):
            return None
        sizes = [_spread(each, num_dims) for each in (stride, padding, dilation)]
        geometry = sizes[0], sizes[1], sizes[2], False, [0] * num_dims, groups
        bias_sizes = [0] if bias is None else bias.shape
        needs = weight.requires_grad, bias is not None and bias.requires_grad
        return CalledProduct(Convolution(geometry, bias_sizes, needs), input, (weight, bias))

    return read


def _spread(size: int | Sequence[int], num_dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * num_dims if len(sizes) == 1 else sizes


# ---- tables


def _read_embedding(node: Node, places: Sequence[int]) -> tuple[Formula, Weights]:
    num_rows, padding = saved(node, "weight_sym_argsize_0"), saved_padding(node)
    return TableLookUp(num_rows, padding, saved(node, "scale_grad_by_freq"), saved(node, "sparse")), (None,)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> CalledProduct | None:
    if max_norm is not None:  # changes the table in passing
        return None
    num_rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % num_rows
    return CalledProduct(TableLookUp(num_rows, padding, scale_grad_by_freq, sparse), input, (weight,))


# ---- the table: where each product is found

NODES: dict[str, Finder] = {
    MM: _finder("self", (1,), _read_mm),
    ADDMM: _finder("mat1", (2,), _read_addmm),
    BMM: _finder("self", (1,), _read_bmm),
    CONVOLUTION: _finder("input", (1, 2), _read_convolution),
    EMBEDDING: _finder("indices", (0,), _read_embedding),
}
FUNCTIONS: dict[Any, FromCall] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.embedding: _embedding,
}
