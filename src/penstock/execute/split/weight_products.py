"""Which functions multiply activations by weights, and the gradients of both sides of such a product, each by itself.

Only these are worth running later: a convolution, a matrix product, a table look-up. The weights of a norm, a gate or
a scale take their gradient from the same pass over the data as the activations do, so parting them would cost a pass.
Each rule here follows autograd's own formulas for its function, operation for operation, so that nothing changes but
the moment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Sequence[Tensor | None]


class Rule(Protocol):
    """How a product and its gradients are computed. It holds no tensors.

    `gradient` is that of `output`. The gradient of a bias is `gradient`, summed to the bias's shape.
    """

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        """Return the product; no view, so that it may be changed in place."""
        ...

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        """Return the gradient of the activations."""
        ...

    def weight_gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]
    ) -> list[Tensor]:
        """Return the gradients of those weights that need one."""
        ...


@dataclass(slots=True, eq=False)
class WeightProduct:
    """One call of a function, seen as a product of activations and weights."""

    rule: Rule
    activations: Tensor
    weights: tuple[Tensor | None, ...]
    bias: Tensor | None = None
    """What is added, and stays in the graph: its gradient needs one pass over that of the output, best while at it."""
    shape: tuple[int, ...] | None = None
    """That of the function's output, where the rule's is another."""
    late_bias: Tensor | None = None
    """What is added to the output once it has its shape."""

    def finish(self, output: Tensor) -> Tensor:
        """Turn what the rule returns into what the function returns."""
        if self.shape is not None:
            output = output.view(self.shape)
        return output if self.late_bias is None else output + self.late_bias


def find_product(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WeightProduct | None:
    """Return the call as a product, or None where it is none or its formula is not known here."""
    reader = _READERS.get(function)
    if reader is None or any(each.layout is not torch.strided for each in args if isinstance(each, Tensor)):
        return None
    return reader(*args, **kwargs)


def may_be_product(function: Any) -> bool:
    """Whether some calls of a function are products."""
    return function in _READERS


# ---- matrix products


@dataclass(frozen=True, slots=True, eq=False)
class _MatrixProduct:
    """rows @ weight + bias, or rows @ weight.T + bias.

    Without a bias the output has as many dimensions as the layer's. As torch has it, it does not count its changes in
    place together with those of the product of the rows, which selective checkpointing may keep.
    """

    is_transposed: bool
    """Whether the weight is [outputs, inputs], as that of a linear layer."""
    leading: tuple[int, ...] = ()
    """The dimensions of the layer's input but the last, where its rows had to be copied."""

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        weight = _first(weights)
        if bias is not None:
            rows = _rows(activations)
            return F.linear(rows, weight, bias) if self.is_transposed else torch.addmm(bias, rows, weight)
        if self.leading:
            activations = activations.view(*self.leading, activations.shape[-1])
        return F.linear(activations, weight) if self.is_transposed else activations.matmul(weight)

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        return _left_gradient(_rows(gradient), activations, self._right(weights))

    def weight_gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]
    ) -> list[Tensor]:
        right_gradient = _right_gradient(_rows(gradient), activations, self._right(weights))
        return [right_gradient.t() if self.is_transposed else right_gradient]

    def _right(self, weights: Weights) -> Tensor:
        """The matrix on the right of the product, [inputs, outputs]."""
        weight = _first(weights)
        return weight.t() if self.is_transposed else weight


class _Batched:
    """One matrix product per entry of the first dimension."""

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        return torch.bmm(activations, _first(weights))

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        return gradient.bmm(_like(_first(weights), gradient).transpose(1, 2))

    def weight_gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]
    ) -> list[Tensor]:
        return [_like(activations, gradient).transpose(1, 2).bmm(gradient)]


_LINEAR, _MATMUL, _BATCHED = _MatrixProduct(is_transposed=True), _MatrixProduct(is_transposed=False), _Batched()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightProduct | None:
    if input.dim() < 2 or not weight.requires_grad:
        return None
    if input.dim() == 2:
        return WeightProduct(_LINEAR, input, (weight,), bias)
    if bias is not None and input.is_contiguous():
        return WeightProduct(_LINEAR, input, (weight,), bias, (*input.shape[:-1], weight.shape[0]))
    # torch adds the bias within the product for the others only
    return WeightProduct(*_with_rows(_LINEAR, input), (weight,), late_bias=bias)


def _matmul(input: Tensor, other: Tensor, **others: Any) -> WeightProduct | None:
    if others or input.dim() < 2 or not other.requires_grad:
        return None
    if input.dim() == other.dim() == 3 and input.shape[0] == other.shape[0]:
        return _batched(input, other)
    if other.dim() != 2:
        return None
    return WeightProduct(*_with_rows(_MATMUL, input), (other,))


def _batched(input: Tensor, mat2: Tensor, **others: Any) -> WeightProduct | None:
    if others:
        return None
    return WeightProduct(_BATCHED, input, (mat2,))


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **others: Any) -> WeightProduct | None:
    if others:
        return None
    return WeightProduct(_MATMUL, mat1, (mat2,), input)


def _first(weights: Weights) -> Tensor:
    """The weight itself; behind it may stand a bias, which alone may be None."""
    assert weights[0] is not None
    return weights[0]


def _with_rows(rule: _MatrixProduct, input: Tensor) -> tuple[_MatrixProduct, Tensor]:
    """Return a product and its input; where the rows have to be copied, the copy, which is what is kept."""
    if not input.is_contiguous():
        dims = [each for each in zip(input.shape[:-1], input.stride()[:-1], strict=True) if each[0] != 1]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(dims)):
            return replace(rule, leading=tuple(input.shape[:-1])), input.reshape(-1, input.shape[-1])
    return rule, input


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _left_gradient(gradient: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The gradient of `left` in `_rows(left) @ right`; it has the layout of the rows, as autograd does it."""
    right, rows = _like(right, gradient), _rows(left)
    is_transposed = rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]
    found = right.mm(gradient.t()).t() if is_transposed else gradient.mm(right.t())
    return found if left.dim() == 2 else found.reshape(left.shape)


def _right_gradient(gradient: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The gradient of `right` [inputs, outputs] in `_rows(left) @ right`; it has its layout, as autograd does it."""
    rows = _like(_rows(left), gradient)
    is_transposed = right.stride(0) == 1 and right.stride(1) == right.shape[0]
    return gradient.t().mm(rows).t() if is_transposed else rows.t().mm(gradient)


def _like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """In the type that the product ran in, which autocast may have chosen."""
    return tensor if tensor.dtype == gradient.dtype else tensor.to(gradient.dtype)


# ---- convolutions


@dataclass(frozen=True, slots=True, eq=False)
class _Convolution:
    """A convolution; its bias is one of its weights."""

    function: Callable[..., Tensor]
    num_dims: int
    """Dimensions of space."""
    geometry: tuple[list[int], list[int], list[int]]
    """Stride, padding, dilation; per dimension of space."""
    groups: int

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        kernel, own_bias = weights
        return self.function(activations, kernel, own_bias, *self.geometry, self.groups)

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        input_gradient: Tensor = self._backward(gradient, activations, weights, (True, False, False))[0]
        return input_gradient

    def weight_gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]
    ) -> list[Tensor]:
        gradients = self._backward(gradient, activations, weights, (False, *needs))[1:]
        return [wanted for wanted, is_needed in zip(gradients, needs, strict=True) if is_needed]

    def _backward(self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]) -> Any:
        kernel = _first(weights)
        return torch.ops.aten.convolution_backward(
            gradient,
            _like(activations, gradient),
            _like(kernel, gradient),
            [kernel.shape[0]],
            *self.geometry,
            False,  # not transposed
            [0] * self.num_dims,
            self.groups,
            needs,
        )


def _convolution(num_dims: int, function: Callable[..., Tensor]) -> Callable[..., WeightProduct | None]:
    """Read calls of a convolution over so many dimensions of space."""

    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> WeightProduct | None:
        if input.dim() != num_dims + 2 or isinstance(padding, str):
            return None
        geometry = _spread(stride, num_dims), _spread(padding, num_dims), _spread(dilation, num_dims)
        return WeightProduct(_Convolution(function, num_dims, geometry, groups), input, (weight, bias))

    return read


def _spread(size: int | Sequence[int], num_dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * num_dims if len(sizes) == 1 else sizes


# ---- tables


@dataclass(frozen=True, slots=True, eq=False)
class _LookUp:
    """Rows of a table; the activations are their numbers, which have no gradient."""

    padding_idx: int | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def output(self, activations: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
        table = _first(weights)
        return F.embedding(
            activations, table, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def input_gradient(self, gradient: Tensor, activations: Tensor, weights: Weights) -> Tensor:
        raise AssertionError("numbers of rows need no gradient")

    def weight_gradients(
        self, gradient: Tensor, activations: Tensor, weights: Weights, needs: Sequence[bool]
    ) -> list[Tensor]:
        num_rows = _first(weights).shape[0]
        padding = -1 if self.padding_idx is None else self.padding_idx % num_rows
        table_gradient: Tensor = torch.ops.aten.embedding_backward(
            gradient, activations, num_rows, padding, self.scale_grad_by_freq, self.sparse
        )
        return [table_gradient]


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> WeightProduct | None:
    if max_norm is not None:  # changes the table in passing
        return None
    return WeightProduct(_LookUp(padding_idx, norm_type, scale_grad_by_freq, sparse), input, (weight,))


_READERS: dict[Any, Callable[..., WeightProduct | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _convolution(1, F.conv1d),
    F.conv2d: _convolution(2, F.conv2d),
    F.conv3d: _convolution(3, F.conv3d),
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    torch.bmm: _batched,
    torch.Tensor.bmm: _batched,
    torch.addmm: _addmm,
}
