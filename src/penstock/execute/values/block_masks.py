"""Block masks of flex_attention, cut along the rows of a batch.

A `BlockMask` holds which blocks of keys the queries of each row see, and `mask_mod(row, head, query, key)` for blocks
that are seen in part. A mask of rows 4 to 7 is asked for its rows 0 to 3, while `mask_mod` reads what belongs to rows
of the whole batch, such as the document of each token. So the function of a part adds the first row of the part.
"""

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_MODULE = "torch.nn.attention.flex_attention"
_NUM_DIMS = 3
"""Dimensions of `kv_num_blocks`: rows, heads and blocks of queries."""


def is_block_mask(value: object) -> bool:
    """Whether a value is a `BlockMask`."""
    # Not imported here, since that takes a second: who has such a mask has imported it.
    return isinstance(value, getattr(sys.modules.get(_MODULE), "BlockMask", ()))


def rows_of_mask(mask: Any) -> int:
    """Return the rows of a block mask; 1 where it holds for any row."""
    num_blocks: Tensor = mask.kv_num_blocks
    return num_blocks.shape[0] if num_blocks.dim() == _NUM_DIMS else 1


def cut_mask(mask: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the masks of consecutive rows, so many in each.

    Raises:
        RuntimeError: torch cannot slice the mask, as one with a tensor `dq_kv_order`.
    """
    return [_mask_of_rows(mask, end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _mask_of_rows(mask: Any, first: int, end: int) -> Any:
    mask_mod = mask.mask_mod

    def shifted(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Added as a tensor, as torch's own pipelining does: the compiler takes it for a part of the graph.
        masked: Tensor = mask_mod(row + torch.full_like(row, first), head, query, key)
        return masked

    part = mask[first:end]
    part.mask_mod = shifted  # torch leaves a function there that refuses to be called
    return part
