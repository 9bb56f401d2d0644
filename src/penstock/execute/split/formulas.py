"""The products of activations and weights, and the gradient of each side by itself.

Only these are worth running later: a matrix product, a convolution, a table look-up. The weights of a norm, a gate or
a scale take their gradient from the same pass over the data as the activations do, so to defer it would cost a pass.
Each formula follows autograd's own, operation for operation, so that nothing changes but the moment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.execute.undocumented import Geometry, convolution_backward, embedding_backward

Weights = Sequence[Tensor | None]
"""The right side of a product. A formula whose weight gradient does not need a weight gets None in its place."""


class Formula(Protocol):
    """How a product and its gradients are computed. It holds no tensors.

    `gradient` is that of `output`. The gradient of a bias is `gradient`, summed to the bias's shape.
    """

    @property
    def num_multiplications(self) -> float:
        """How many the weight gradients take; infinite where they say nothing of its time."""
        ...

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        """Return the product; no view, so that it may be changed in place."""
        ...

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        """Return the gradient of the activations."""
        ...

    def weight_gradients(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
        """Return the gradients of the weights, None for those that need none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MatrixProduct:
    """rows @ right + bias.

    Without a bias the output has as many dimensions as the layer's. As torch has it, it does not count its changes in
    place together with those of the product of the rows, which selective checkpointing may keep.
    """

    num_multiplications: int
    is_column_major: bool
    """The memory format of `right` [inputs, outputs]; autograd gives its gradient the same."""
    is_linear: bool = False
    """Whether the weight is [outputs, inputs], the transpose of `right`, as that of a linear layer."""
    leading: tuple[int, ...] = ()
    """The dimensions of the layer's input but the last, where its rows had to be copied."""

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        weight = first(weights)
        if bias is not None:
            rows = _rows(activations)
            return F.linear(rows, weight, bias) if self.is_linear else torch.addmm(bias, rows, weight)
        if self.leading:
            activations = activations.view(*self.leading, activations.shape[-1])
        return F.linear(activations, weight) if self.is_linear else activations.matmul(weight)

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        gradient, weight = _rows(gradient), _like(first(weights), gradient)
        right = weight.t() if self.is_linear else weight
        # The gradient has the memory format of the rows.
        is_column_major = has_columns_first(_rows(activations))
        found = right.mm(gradient.t()).t() if is_column_major else gradient.mm(right.t())
        return found if activations.dim() == 2 else found.reshape(activations.shape)

    def weight_gradients(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
        gradient = _rows(gradient)
        rows = _like(_rows(activations), gradient).conj()
        found = gradient.t().mm(rows).t() if self.is_column_major else rows.t().mm(gradient)
        return [found.t() if self.is_linear else found]


class BatchedProduct:
    """One matrix product per entry of the first dimension."""

    num_multiplications = math.inf

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return torch.bmm(activations, first(weights))

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        return gradient.bmm(_like(first(weights), gradient).transpose(1, 2))

    def weight_gradients(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
        return [_like(activations, gradient).transpose(1, 2).conj().bmm(gradient)]


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A convolution; its bias is one of its weights."""

    geometry: Geometry
    bias_sizes: Sequence[int]
    needs: tuple[bool, bool]
    """Whether the kernel and the bias need a gradient."""
    num_multiplications: float = math.inf

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[activations.dim() - 3]
        stride, padding, dilation, _, _, groups = self.geometry
        return convolve(activations, first(weights), weights[1], stride, padding, dilation, groups)

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        found = self._gradients(gradient, activations, weights, (True, False, False))[0]
        assert found is not None
        return found

    def weight_gradients(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
        return self._gradients(gradient, activations, weights, (False, *self.needs))[1:]

    def _gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: tuple[bool, bool, bool]
    ) -> Weights:
        operands = _like(activations, gradient), _like(first(weights), gradient)
        return convolution_backward(gradient, *operands, self.geometry, self.bias_sizes, needs)


@dataclass(frozen=True, slots=True, eq=False)
class TableLookUp:
    """Rows of a table; the activations are their numbers, which have no gradient."""

    num_rows: int
    padding: int
    """The row without a gradient, -1 for none."""
    scales_by_frequency: bool
    is_sparse: bool
    num_multiplications: float = math.inf

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        padding = None if self.padding < 0 else self.padding
        options = {"scale_grad_by_freq": self.scales_by_frequency, "sparse": self.is_sparse}
        return F.embedding(activations, first(weights), padding, **options)

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        raise AssertionError("numbers of rows need no gradient")

    def weight_gradients(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
        options = self.num_rows, self.padding, self.scales_by_frequency, self.is_sparse
        return [embedding_backward(gradient, activations, *options)]


def first(weights: Weights) -> Tensor:
    """Return the weight itself; only a bias, which comes behind it, may be None where weights are needed."""
    assert weights[0] is not None
    return weights[0]


def has_columns_first(matrix: Tensor) -> bool:
    """Whether a matrix is stored column by column."""
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """In the type that the product ran in, which autocast may have chosen."""
    return tensor if tensor.dtype == gradient.dtype else tensor.to(gradient.dtype)
