"""Which functions multiply activations by weights, and the gradients of these weights by themselves.

Only these are worth running later: a convolution, a matrix product, a table look-up. The weights of a norm, a gate or
a scale take their gradient from the same pass over the data as the activations do, so parting them would cost a pass.
Each product here follows autograd's own formula for its function, operation for operation, so that nothing changes but
the moment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Gradients = Callable[[Tensor, Tensor, Sequence[bool]], list[Tensor]]
"""From the activations, the gradient of the output, and which weights are asked for: the gradients of those."""


def _as_it_is(output: Tensor) -> Tensor:
    return output


@dataclass(frozen=True, slots=True, eq=False)
class WeightProduct:
    """One call of a function, seen as a product of activations and weights."""

    activations: Tensor
    weights: tuple[Tensor | None, ...]
    call: Callable[..., Tensor]
    """The function of the weights alone, up to `finish`. No view: autograd loses sight of one that is changed."""
    gradients: Gradients
    """Holds no activations; the gradient that it takes is that of what `call` returns."""
    finish: Callable[[Tensor], Tensor] = _as_it_is
    """Gives the function's output its shape."""
    bias: Tensor | None = None
    """What is added, and stays in the graph: its gradient needs one pass over that of the output, best while at it."""

    @property
    def is_in_graph(self) -> bool:
        """Whether autograd follows the output, too, when the weights are detached."""
        return self.activations.requires_grad or (self.bias is not None and self.bias.requires_grad)


def find_product(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WeightProduct | None:
    """Return the call as a product, or None where it is none or its formula is not known here."""
    reader = _READERS.get(function)
    return None if reader is None else reader(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightProduct | None:
    if input.dim() < 2 or not weight.requires_grad:
        return None
    rows, shape = input, input.shape[:-1]
    # torch adds the bias within the product for these only
    is_added = bias is None or input.dim() == 2 or (input.dim() == 3 and input.is_contiguous())
    own_bias, late_bias = (bias, None) if is_added else (None, bias)
    if input.dim() > 2:
        rows = input.reshape(-1, input.shape[-1])

    def finish(output: Tensor) -> Tensor:
        output = output if len(shape) == 1 else output.view(*shape, -1)
        return output if late_bias is None else output + late_bias

    return WeightProduct(rows, (weight,), lambda w: F.linear(rows, w, own_bias), _linear_gradients, finish, own_bias)


def _linear_gradients(activations: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    return [gradient.t().mm(_like(activations, gradient))]


def _matmul(input: Tensor, other: Tensor, **others: Any) -> WeightProduct | None:
    if others or input.dim() < 2 or not other.requires_grad:
        return None
    if input.dim() == other.dim() == 3 and input.shape[0] == other.shape[0]:
        return _batched(input, other)
    if other.dim() != 2:
        return None
    rows, shape = input.reshape(-1, input.shape[-1]) if input.dim() > 2 else input, input.shape[:-1]

    def finish(output: Tensor) -> Tensor:
        return output if len(shape) == 1 else output.view(*shape, -1)

    return WeightProduct(rows, (other,), lambda w: rows.mm(w), _matrix_gradients(other), finish)


def _batched(input: Tensor, mat2: Tensor, **others: Any) -> WeightProduct | None:
    return None if others else WeightProduct(input, (mat2,), lambda w: torch.bmm(input, w), _batched_gradients)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **others: Any) -> WeightProduct | None:
    if others:
        return None
    return WeightProduct(mat1, (mat2,), lambda w: torch.addmm(input, mat1, w), _matrix_gradients(mat2), bias=input)


def _matrix_gradients(weight: Tensor) -> Gradients:
    """The weight is [inputs, outputs]; its gradient has its layout, as autograd does it."""
    is_transposed = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]

    def gradients(activations: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        inputs = _like(activations, gradient)
        return [gradient.t().mm(inputs).t() if is_transposed else inputs.t().mm(gradient)]

    return gradients


def _batched_gradients(activations: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    return [_like(activations, gradient).transpose(1, 2).bmm(gradient)]


def _like(activations: Tensor, gradient: Tensor) -> Tensor:
    """In the type that the product ran in, which autocast may have chosen."""
    return activations if activations.dtype == gradient.dtype else activations.to(gradient.dtype)


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
        geometry = [_spread(size, num_dims) for size in (stride, padding, dilation)]

        def gradients(activations: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor]:
            kernel = weight.detach().to(gradient.dtype)
            found = torch.ops.aten.convolution_backward(
                gradient,
                _like(activations, gradient),
                kernel,
                [kernel.shape[0]],
                *geometry,
                False,  # not transposed
                [0] * num_dims,
                groups,
                (False, *needs),
            )
            return [each for each, is_needed in zip(found[1:], needs, strict=True) if is_needed]

        def call(w: Tensor, b: Tensor | None) -> Tensor:
            return function(input, w, b, stride, padding, dilation, groups)

        return WeightProduct(input, (weight, bias), call, gradients)

    return read


def _spread(size: int | Sequence[int], num_dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * num_dims if len(sizes) == 1 else sizes


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
    num_rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % num_rows

    def gradients(activations: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        found: Tensor = torch.ops.aten.embedding_backward(
            gradient, activations, num_rows, padding, scale_grad_by_freq, sparse
        )
        return [found]

    def call(w: Tensor) -> Tensor:
        return F.embedding(input, w, padding_idx, None, norm_type, scale_grad_by_freq, sparse)

    return WeightProduct(input, (weight,), call, gradients)


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
