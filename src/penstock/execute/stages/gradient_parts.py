"""What one rank tells another of a gradient that both hold copies of: nothing, its values, or the rows it touches.

    dense       [values]            sparse, as of `nn.Embedding(sparse=True)`    [rows, values of these rows]

A parameter that no holder has used gets no gradient, as in one process, where weight decay leaves it alone. One whose
uses all give sparse gradients gets a sparse one, as `torch.optim.SparseAdam` wants it.
"""

from collections.abc import Sequence
from enum import Enum
from typing import assert_never

import torch
from torch import Tensor

ABSENT = -2
DENSE = -1


class Form(Enum):
    """How a gradient travels between its holders."""

    NONE = "none"
    DENSE = "dense"
    SPARSE = "sparse"


def size_of(gradient: Tensor | None) -> int:
    """Return what a holder tells of its gradient first: `ABSENT`, `DENSE`, or how many rows a sparse one has."""
    if gradient is None:
        return ABSENT
    return len(gradient.values()) if gradient.is_sparse else DENSE


def common_form(sizes: Sequence[int]) -> Form:
    """Return how the gradients of all holders travel, from what each has told of its own."""
    if DENSE in sizes:
        return Form.DENSE
    return Form.NONE if all(size == ABSENT for size in sizes) else Form.SPARSE


def settled(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with each row once, if it is sparse in rows; any other sparse one as a dense one."""
    if gradient is None or not gradient.is_sparse:
        return gradient
    return gradient.coalesce() if gradient.sparse_dim() == 1 else gradient.to_dense()


def parts_of(gradient: Tensor | None, like: Tensor, form: Form) -> list[Tensor]:
    """Return what is sent of a settled gradient; `like` has the shape and type of a dense one."""
    match form:
        case Form.NONE:
            return []
        case Form.DENSE:
            return [like.new_zeros(like.shape) if gradient is None else dense(gradient)]
        case Form.SPARSE:
            return room_for(like, form, 0) if gradient is None else [gradient.indices(), gradient.values()]
    assert_never(form)


def room_for(like: Tensor, form: Form, size: int) -> list[Tensor]:
    """Return where another holder's parts arrive, of the size that it has told."""
    match form:
        case Form.NONE:
            return []
        case Form.DENSE:
            return [like.new_empty(like.shape)]
        case Form.SPARSE:
            num_rows = max(size, 0)
            rows = torch.empty((1, num_rows), dtype=torch.int64, device=like.device)
            return [rows, like.new_empty((num_rows, *like.shape[1:]))]
    assert_never(form)


def total_of(parts: Sequence[Sequence[Tensor]], like: Tensor, form: Form) -> Tensor | None:
    """Return the sum of all holders' gradients, in their order."""
    match form:
        case Form.NONE:
            return None
        case Form.DENSE:
            total = parts[0][0].clone()
            for (values,) in parts[1:]:
                total += values
            return total
        case Form.SPARSE:
            rows = torch.cat([each for each, _ in parts], dim=1)
            values = torch.cat([each for _, each in parts])
            return torch.sparse_coo_tensor(rows, values, like.shape, check_invariants=False).coalesce()
    assert_never(form)


def added(before: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Return what was accumulated before with this step's sum on top of it; sparse if both are."""
    if before is None or total is None:
        return total if before is None else before
    return before + total if before.is_sparse and total.is_sparse else dense(before) + dense(total)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its values written out."""
    return gradient.to_dense() if gradient.is_sparse else gradient
