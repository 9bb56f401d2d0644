"""Rows are shared out as DTensor shares out `Shard(0)`, whatever the shape, and come together again."""

import pytest
import torch

from penstock.execute.replicas.rows import Rows
from tests.support.local_pipelines import values

SHAPES = [(), (1,), (5,), (5, 3), (1, 2), (0, 3), (4, 0), (8, 2, 3, 3)]


def parts_of(rows, whole):
    parts = torch.full((rows.num_replicas, rows.part_elements), 9.0)
    rows.share_out(whole, parts)
    return parts


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_the_whole_and_each_replica_has_the_rows_that_chunk_gives_it_and_zeros_behind(shape, num_replicas):
    whole = values(1, *shape, 1)[..., 0]
    rows = Rows.of(whole, num_replicas)
    parts = parts_of(rows, whole)

    assert torch.equal(rows.whole_in(parts.reshape(-1)), whole)
    if not shape:  # each replica has a scalar as a whole
        assert parts.tolist() == [[whole.item()]] * num_replicas
        return
    expected = [*whole.chunk(num_replicas), *[whole[:0]] * num_replicas][:num_replicas]
    for replica, part in enumerate(parts):
        own = rows.own_in(part, replica)
        assert torch.equal(own, expected[replica])
        assert not part[own.numel() :].any()
        taken = torch.zeros(rows.part_elements)
        rows.take_own(whole, taken, replica)
        assert torch.equal(taken, part)


def test_dimensions_stay_in_their_order_in_memory_where_rows_are_outermost():
    whole = values(1, 8, 2, 3, 3).to(memory_format=torch.channels_last)
    rows = Rows.of(whole, 3)

    assert rows.whole_in(parts_of(rows, whole).reshape(-1)).stride() == whole.stride()
    assert rows.own_in(parts_of(rows, whole)[2], 2).is_contiguous(memory_format=torch.channels_last)
    whole = values(1, 4, 6).t()  # whose rows do not lie one after another, so they get contiguous memory
    rows = Rows.of(whole, 2)
    assert rows.whole_in(parts_of(rows, whole).reshape(-1)).stride() == (4, 1)
