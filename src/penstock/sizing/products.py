"""The matrix products that an operation computes: one formula for each operation that has any.

    mm [rows, inner] x [inner, columns]         one product
    attention, forward                          scores = q k^T, outputs = scores v
    attention, backward                         scores again, and the gradients of v, scores, q and k

Operations that pass over their tensors once have no formula: the bytes that they move say what they take. Others that
work more than that, and all that is not torch's own, have none either, and are named in the result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.simulation.costs.layer_work import Product
from penstock.sizing.undocumented import Operation

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments, Sequence[Tensor]], list[Product]]
"""Takes the arguments of an operation by name, and its outputs. Raises: KeyError or ValueError, for unknown forms."""

_CAUSAL_SHARE = 0.5
_TORCHS_OWN = frozenset({"aten", "prims", "profiler", "inductor_prims"})
_COSTLY_WORDS = frozenset(
    [
        *("matmul", "convolution", "conv", "attention", "linear", "bilinear", "trilinear", "einsum", "cdist", "pdist"),
        *("fft", "linalg", "cholesky", "svd", "qr", "eig", "inverse", "solve", "det", "lstm", "gru", "rnn", "ctc"),
    ]
)
"""Words in the names of operations that work more than once over what they read and write."""
_SINGLE_PASSES = frozenset({"linalg_vector_norm"})
"""Operations with such a word that pass over their tensors once."""
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
)


def products_of(operation: Operation, arguments: Arguments, outputs: Sequence[Tensor]) -> list[Product] | None:
    """Return the products of one call of an operation; None where there is no formula, though it costs work."""
    formula = FORMULAS.get(operation.name)
    if formula is None:
        return None if _costs_work(operation) else []
    try:
        return [product for product in formula(arguments, outputs) if product.flops]
    except (KeyError, ValueError):
        return None


def _costs_work(operation: Operation) -> bool:
    if operation.name in _SINGLE_PASSES:
        return False
    words = operation.name.strip("_").split("_")
    return operation.namespace not in _TORCHS_OWN or any(word in _COSTLY_WORDS or word.endswith("mm") for word in words)


def _type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _matrices(left: Tensor, right: Tensor) -> list[Product]:
    *batch, rows, inner = left.shape
    return [
        Product(rows=rows, columns=right.shape[-1], inner=inner, batch=math.prod(batch), data_type=_type_of(left)),
    ]


def _grouped(left: Tensor, right: Tensor, offsets: Tensor) -> list[Product]:
    """Return the products of all groups, as many as there are `offsets`, each with the mean rows or inner dimension.

    Each group has a matrix of its own (`right` has 3 dimensions), or a part of the inner dimension.
    """
    if left.dim() != 2 or right.dim() not in (2, 3):
        raise ValueError(f"a grouped product of {left.dim()} and {right.dim()} dimensions")
    groups, (rows, inner) = offsets.shape[0], left.shape
    if right.dim() == 3:
        rows = math.ceil(rows / groups)
    else:
        inner = math.ceil(inner / groups)
    return [
        Product(
            rows=rows,
            columns=right.shape[-1],
            inner=inner,
            batch=groups,
            data_type=_type_of(left),
            kernel="grouped",
        )
    ]


def _attention(arguments: Arguments, outputs: Sequence[Tensor]) -> list[Product]:
    return _attention_products(arguments)[:2]


def _attention_backward(arguments: Arguments, outputs: Sequence[Tensor]) -> list[Product]:
    """Return the scores, which are computed again, and four gradients: of the value, the scores, the query, the key."""
    return _attention_products(arguments)[:1] + _attention_products(arguments)[2:]


def _attention_products(arguments: Arguments) -> list[Product]:
    """Return the two products of a forward and the four gradients of a backward."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    *heads, rows, size = query.shape
    columns, value_size = key.shape[-2], value.shape[-1]

    def product(rows: int, columns: int, inner: int) -> Product:
        return Product(
            rows=rows,
            columns=columns,
            inner=inner,
            batch=math.prod(heads),
            data_type=_type_of(query),
            kernel="attention",
            computed_share=_CAUSAL_SHARE if arguments["is_causal"] else 1.0,
        )

    forward = [product(rows, columns, size), product(rows, value_size, columns)]
    of_value, of_scores = product(columns, value_size, rows), product(rows, columns, value_size)
    return [*forward, of_value, of_scores, product(rows, size, columns), product(columns, size, rows)]


def _convolution(output: Tensor, kernel: Tensor, *, is_transposed: bool, groups: int) -> Product:
    """Return the product of an im2col: positions of the output, channels of a group, window times channels."""
    positions = output.shape[0] * math.prod(output.shape[2:])
    columns, inner = kernel.shape[0] // groups, math.prod(kernel.shape[1:])
    if is_transposed:
        columns, inner = kernel.shape[1], kernel.shape[0] // groups * math.prod(kernel.shape[2:])
    return Product(
        rows=positions, columns=columns, inner=inner, batch=groups, data_type=_type_of(kernel), kernel="convolution"
    )


def _is_by_channel(arguments: Arguments) -> bool:
    """Whether each channel is convolved by itself: a pass over the tensors, which no kernel computes as a product."""
    return bool(arguments["groups"] > 1 and arguments["weight"].shape[1] == 1)


def _forward_convolution(arguments: Arguments, outputs: Sequence[Tensor]) -> list[Product]:
    if _is_by_channel(arguments):
        return []
    swaps = arguments["transposed"]
    sized = arguments["input"] if swaps else outputs[0]
    return [_convolution(sized, arguments["weight"], is_transposed=swaps, groups=arguments["groups"])]


def _backward_convolution(arguments: Arguments, outputs: Sequence[Tensor]) -> list[Product]:
    if _is_by_channel(arguments):
        return []
    swaps = arguments["transposed"]
    sized = arguments["input"] if swaps else arguments["grad_output"]
    product = _convolution(sized, arguments["weight"], is_transposed=swaps, groups=arguments["groups"])
    return [product] * sum(arguments["output_mask"][:2])


def _named(left: str, right: str) -> Formula:
    return lambda arguments, outputs: _matrices(arguments[left], arguments[right])


FORMULAS: Mapping[str, Formula] = {
    "mm": _named("self", "mat2"),
    "addmm": _named("mat1", "mat2"),
    "bmm": _named("self", "mat2"),
    "baddbmm": _named("batch1", "batch2"),
    "_grouped_mm": lambda arguments, outputs: _grouped(arguments["self"], arguments["mat2"], arguments["offs"]),
    "convolution": _forward_convolution,
    "convolution_backward": _backward_convolution,
    **dict.fromkeys(_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in _ATTENTION},
}
"""The formula of each operation, by the operation's name."""
