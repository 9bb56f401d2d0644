"""A block mask is cut along the rows of a batch, and its function is told where they begin."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from penstock.execute.values.block_masks import cut_mask, is_block_mask, rows_of_mask

ROWS, LENGTH, BLOCK = 6, 8, 4
SIZES = [3, 1, 2]
DOCUMENTS = torch.randint(0, 3, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).cumsum(1) // 3


def within_document(row, head, query, key):
    return (DOCUMENTS[row, query] == DOCUMENTS[row, key]) & (query >= key)


def mask_of(rows=ROWS, mask_mod=within_document, **options):
    return create_block_mask(mask_mod, rows, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK, **options)


def dense(mask, rows):
    return create_mask(mask.mask_mod, rows, 1, LENGTH, LENGTH, device="cpu")


def test_a_block_mask_is_known_and_has_rows():
    assert is_block_mask(mask_of())
    assert not is_block_mask(torch.ones(ROWS))
    assert rows_of_mask(mask_of()) == ROWS
    assert rows_of_mask(mask_of(None, lambda row, head, query, key: query >= key)) == 1


@pytest.mark.parametrize("separate_full_blocks", [True, False])
def test_parts_are_the_masks_that_their_rows_would_have_been_given_and_can_be_cut_again(separate_full_blocks):
    mask = mask_of(separate_full_blocks=separate_full_blocks)

    for part, first, size in zip(cut_mask(mask, SIZES), [0, 3, 4], SIZES, strict=True):
        own = mask_of(size, lambda row, head, query, key, first=first: within_document(row + first, head, query, key))
        assert part.shape == own.shape
        assert torch.equal(part.to_dense(), own.to_dense())
        assert torch.equal(part.kv_num_blocks, own.kv_num_blocks)
        assert torch.equal(part.q_num_blocks, own.q_num_blocks)
        assert torch.equal(dense(part, size), dense(mask, ROWS)[first : first + size])
    again = cut_mask(cut_mask(mask, [2, 4])[1], [1, 3])[1]
    assert torch.equal(dense(again, 3), dense(mask, ROWS)[3:])
    assert torch.equal(again.to_dense(), mask.to_dense()[3:])
